"""Pipeline: a model cut into stages over the ranks, and the schedule that trains it.

`pipeline(model, plan, loss_fn, batch)` is called by every rank. It cuts the model where the plan
says, compiles the turns of this rank's stages and makes torch's schedule of them. The ranks compare
what they have before anything is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.distribute.clip import clip_by_norm, norm_of_gradients
from cotrain_compile.errors import DistributeError, OptionError
from cotrain_compile.pipelining.cut import StagePart, cut, keep, try_out, visits
from cotrain_compile.pipelining.gathered import GatheredStages
from cotrain_compile.pipelining.grid import Grid, divide, hand_over, share
from cotrain_compile.pipelining.memory import StageMemory, fit_whole, stage_memory
from cotrain_compile.pipelining.together import (
    StageRanks,
    compared,
    refuse_norms_of_parts,
    torch_takes_norms,
)
from cotrain_compile.pipelining.torch_stages import (
    TurnStage,
    make_schedule,
    schedule_class,
    without_dumps,
)
from cotrain_compile.pipelining.turns import (
    Gradients,
    LossFunction,
    Turns,
    compiled_update,
)


class Pipeline:
    """The stages of this rank. `schedule` is torch's, `stages` are what it runs."""

    def __init__(
        self,
        plan: StagePlan,
        stages: list[TurnStage],
        schedule: Any,
        gradients: Gradients,
        memory: StageMemory,
        ranks: StageRanks,
        grid: Grid,
        gathered: GatheredStages | None,
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.schedule = schedule
        self.memory = memory
        self.gathered = gathered
        self._gradients = gradients
        self._ranks = ranks
        self._grid = grid

    @property
    def replica(self) -> int:
        """Which of the `replicas` this rank's stages belong to."""
        return self._grid.replica

    @property
    def replicas(self) -> int:
        """How many pipelines there are, each with samples of its own."""
        return self._grid.replicas

    def step(
        self,
        *batch: torch.Tensor,
        target: torch.Tensor,
        losses: list[torch.Tensor] | None = None,
        update: Callable[[], None] | None = None,
    ) -> None:
        """Forward and backward of all micro-batches; every rank gives the batch of its replica.

        Gradients are in `.grad` then, means over all samples of all replicas. `losses` gets the
        loss of each micro-batch, those of all replicas, the same on all ranks, so that they decide
        alike.

        Where a rank fails no rank has gradients, and each raises: `RanksApart` where ranks have
        other batches or one tells of its error, `ExchangeFailed` where one dies or hangs,
        `DistributeError` where the batch is not what the plan says. After the first and the last of
        these all may go on.

        With `update`, what `compiled_update` has given, a rank updates as soon as its own last turn
        is through, while others have theirs (just in time). Where one fails then, others may have
        updated: their errors say so, and all have to start again.
        """
        self._gradients.attach()
        self._run("step", self.schedule.step, batch, target, losses, update)

    def eval(
        self, *batch: torch.Tensor, target: torch.Tensor, losses: list[torch.Tensor] | None = None
    ) -> None:
        """The losses alone."""
        self._run("eval", self.schedule.eval, batch, target, losses)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients by the norm of the whole model's, on all ranks; that norm.

        Between `step` and the update, by every rank. `torch.nn.utils.clip_grad_norm_` of the
        parameters of a rank is refused.
        """
        params = self._gradients.params()
        with torch_takes_norms():
            own = norm_of_gradients(params, norm_type)
        norms = self._grid.of_one_replica(self._ranks.numbers_of_all(float(own)))
        of_stages = torch.tensor(norms, dtype=torch.float64)
        norm: torch.Tensor = torch.linalg.vector_norm(of_stages, norm_type).to(own)
        clip_by_norm(params, max_norm, norm)
        return norm

    def compiled_update(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """What updates the parameters of this rank, and sets gradients to zero."""
        return compiled_update(
            optimizer, self.memory.of_update(), self._grid.sharing, self._ranks.tell_of_update
        )

    def _run(
        self,
        name: str,
        run: Callable[..., Any],
        batch: Sequence[torch.Tensor],
        target: torch.Tensor,
        losses: list[torch.Tensor] | None,
        update: Callable[[], None] | None = None,
    ) -> None:
        shapes = [tuple(tensor.shape) for tensor in (*batch, target)]
        self._ranks.begin(f"{name} of a pipeline with a batch of {shapes}")
        self._refuse_other_size(shapes)
        found: list[torch.Tensor] = []
        kept = {"losses": found} if any(stage.is_last for stage in self.stages) else {}
        for stage in self.stages:
            stage.failed = None
        self.memory.begin(training=name == "step")
        early = update is not None
        try:
            with self._ranks.exchanges(early=early), without_dumps():
                self._grid.send_first(self._buffers())
                if self.gathered is not None:
                    self.gathered.begin()
                run(*batch, target=target, return_outputs=False, **kept)
            self.memory.leave()
            failed = next(filter(None, (stage.failed for stage in self.stages)), None)
            if early:
                self._add_up()
                if update is not None and failed is None:
                    update()
            of_all = self._ranks.all_done(failed, [float(loss) for loss in found], early=early)
            if name == "step" and not early:
                self._add_up()
            if name == "eval" and self.gathered is not None:
                self.gathered.leave()
        except BaseException:
            self._gradients.detach()
            raise
        if losses is not None:
            is_all = found and self.replicas == 1
            losses += found if is_all else list(torch.tensor(self._grid.of_replicas(of_all)))

    def _add_up(self) -> None:
        with self._ranks.exchanges():
            if self.gathered is not None:
                self.gathered.scatter()
            self._grid.add_up(self._gradients.all())

    def begin_alike(self) -> None:
        """Give all replicas the parameters and buffers of the first one."""
        with self._ranks.exchanges():
            self._grid.begin_alike([*self._gradients.params(), *self._buffers()])

    def _buffers(self) -> list[torch.Tensor]:
        modules = (stage.turns.part.module for stage in self.stages)
        return list(dict.fromkeys(buffer for module in modules for buffer in module.buffers()))

    def _refuse_other_size(self, shapes: Sequence[tuple[int, ...]]) -> None:
        for shape in shapes:
            if shape[:1] != (self.plan.samples,):
                raise DistributeError(
                    f"a batch of {shape[0] if shape else 'no'} samples, and the plan has "
                    f"{self.plan.micro_batches} micro-batches of {self.plan.micro_batch}; give "
                    f"{self.plan.samples} samples a step (drop_last=True leaves the last few out)"
                )


def pipeline(
    model: nn.Module,
    plan: str | os.PathLike[str] | StagePlan,
    loss_fn: LossFunction,
    batch: Sequence[torch.Tensor],
    target: torch.Tensor,
    *,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    sequence: bool = False,
) -> Pipeline:
    """Cut `model` into stages over all ranks, in place, and return what trains it.

    Every rank calls it with the same model, after the process group was initialised and before an
    optimizer is made. `plan` is a `StagePlan`, or the file that `cotrain-compile cluster` has saved
    one to; of several pipelines in it the fastest counts, or the one that `strategy` names.
    `batch` is an example of what the model takes in a step, with its `target`; all turns are
    compiled with it. `loss_fn` takes what the model returns and the target of a micro-batch, and
    gives the mean over its samples. `options` are those of this backend; their `memory_budget` is
    what this rank may take. With `sequence` the layouts of `tensor_plan` divide what goes from
    stage to stage by tokens, its second dimension, over the ranks of "tensor".

    After it `model` has the parameters of this rank's stages, under their names.

    Raises `DistributeError`, on every rank, where ranks have other plans or models, where the plan
    is not for this model or so many ranks, and where the model cannot be cut there; and
    `PlacementError` where a stage does not fit.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributeError(
            "pipeline() needs a process group: start the script by torchrun, and call "
            "torch.distributed.init_process_group() before"
        )
    ranks = StageRanks()
    grid = ranks.make(lambda: Grid(mesh))
    read = ranks.make(lambda: plan if isinstance(plan, StagePlan) else read_plan(plan, strategy))
    samples = (*batch, target)
    same = compared(model, read, loss_fn, samples)
    ranks.make(lambda: _refuse_other_batch(samples, read), same)
    making = _Making(
        model, read, loss_fn, samples, options or {}, ranks, grid, tensor_plan or {}, sequence
    )
    made = ranks.make(making.made)
    made.begin_alike()
    return made


def read_plan(path: str | os.PathLike[str], strategy: str | None = None) -> StagePlan:
    """The plan of stages in a file: a `StagePlan`, or of an `Answer` the fastest pipeline.

    Raises `FormatError` where it is neither, `OptionError` where the answer has no such pipeline.
    """
    if files.kind_of(path) != "answer":
        return files.load(path, StagePlan)
    answer = files.load(path, Answer)
    alone = (one for one in answer.strategies if one.layout is None)  # else on a mesh of ranks
    known = {one.name: one.stages for one in alone if one.stages is not None}
    if not known:
        raise OptionError(
            f"{path} has no pipeline that fits; let `cotrain-compile cluster` judge "
            "--strategies pipeline-gpipe,pipeline-1f1b,harmony-pp"
        )
    name = next(iter(known)) if strategy is None else strategy
    if name not in known:
        raise OptionError(f"{path} has no pipeline {name!r}; it has {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class _Making:
    """What a rank makes its `Pipeline` of: what `pipeline` was given, and who takes part."""

    model: nn.Module
    plan: StagePlan
    loss_fn: LossFunction
    batch: Sequence[torch.Tensor]
    options: Mapping[str, Any]
    together: StageRanks
    grid: Grid
    tensor_plan: Mapping[str, ParallelStyle]
    sequence: bool

    def made(self) -> Pipeline:
        """The stages of this rank, compiled, under torch's schedule."""
        plan, ranks = self.plan, self.grid.ranks
        schedule_class(plan.schedule, plan.stages, ranks)
        parts = self._parts()
        gathered = self._shared(parts)
        gradients = Gradients(self.model)
        gradients.attach()
        homes = () if gathered is None else gathered.homes.values()
        memory = stage_memory(parts, plan, self.options, homes)
        stages = [self._stage(place, part, memory, gathered) for place, part in enumerate(parts)]
        memory.set_up_is_done()
        if gathered is not None:
            gathered.leave()
        gradients.detach()
        if dist.get_world_size() > 1:
            refuse_norms_of_parts(self.model.parameters())
        schedule = make_schedule(plan.schedule, stages, ranks, plan.micro_batches)
        own = plan, stages, schedule, gradients, memory
        return Pipeline(*own, self.together, self.grid, gathered)

    @property
    def _own(self) -> range:
        """The numbers of this rank's stages."""
        return range(self.grid.rank, self.plan.stages, self.grid.ranks)

    @cached_property
    def _micro_batch(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What the model takes of one, and its target."""
        *taken, target = (tensor[: self.plan.micro_batch].clone() for tensor in self.batch)
        return taken, target

    def _parts(self) -> list[StagePart]:
        """The parts of the model that are this rank's stages; it keeps no others."""
        points, (micro_batch, _) = self.plan.split_points, self._micro_batch
        found = visits(self.model, points, micro_batch)
        parts = [cut(self.model, points, found, stage) for stage in self._own]
        for part in parts:
            try_out(part, micro_batch)
        keep(self.model, points, found, set(self._own))
        return parts

    def _shared(self, parts: Sequence[StagePart]) -> GatheredStages | None:
        """Divide the parameters of `parts` over the ranks of a stage; what gathers them, if any."""
        plan, grid = self.plan, self.grid
        modules = [part.module for part in parts]
        divide(modules, plan, grid, self.tensor_plan)
        once = grid.shard is not None and fit_whole(parts, plan, self.options, grid.shard.size())
        gathered = share(modules, grid, once=once)
        hand_over(self.model, modules, {} if gathered is None else gathered.homes)
        if self.sequence and grid.tensor is not None:
            for part in parts:
                part.divide_tokens(grid.tensor.size())
                try_out(part, self._micro_batch[0])
        return gathered

    def _stage(
        self, place: int, part: StagePart, memory: StageMemory, gathered: GatheredStages | None
    ) -> TurnStage:
        """The stage at `place` among this rank's, its turns compiled and run dry."""
        plan, grid, (micro_batch, target) = self.plan, self.grid, self._micro_batch
        turns = Turns(
            part,
            self.loss_fn,
            1.0 / (plan.micro_batches * grid.summed),
            grid.sharing,
            memory.of_forward(part),
            memory.of_backward(part),
            memory.bring(part) if gathered is None else gathered.bring(place),
        )
        turns.dry_run(micro_batch, target)
        memory.require_whole(part, turns.functions)
        return TurnStage(
            turns,
            self._own[place],
            plan.stages,
            next(self.model.parameters()).device,
            micro_batch,
            torch.empty((), device="meta"),
            grid.group,
            in_turn=plan.stages > grid.ranks,
        )


def _refuse_other_batch(batch: Sequence[torch.Tensor], plan: StagePlan) -> None:
    for tensor in batch:
        if tensor.dim() == 0 or tensor.shape[0] < plan.micro_batch:
            raise DistributeError(
                f"the plan has micro-batches of {plan.micro_batch} samples, and the example batch "
                f"has a tensor of {tuple(tensor.shape)}; give as many samples as a step has, first"
            )
