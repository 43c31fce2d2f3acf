"""Pipeline: a model cut into stages over the ranks, and the schedule that trains it.

`pipeline(model, plan, loss_fn, batch)` is called by every rank. It cuts the model where the plan
says, compiles the turns of this rank's stages and makes torch's schedule of them. The ranks compare
what they have before anything is sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from cotrain_compile import files
from cotrain_compile.cluster.stage_plan import StagePlan
from cotrain_compile.cluster.strategy import Answer
from cotrain_compile.errors import CotrainError, DistributeError, OptionError
from cotrain_compile.pipelining.budgets import TurnBudgets, turn_budgets
from cotrain_compile.pipelining.cut import Part, cut, keep, try_out
from cotrain_compile.pipelining.torch_stages import TurnStage, make_schedule, schedule_class
from cotrain_compile.pipelining.turns import (
    Gradients,
    LossFunction,
    Turns,
    compiled_update,
)
from cotrain_compile.pipelining.visits import visits
from cotrain_compile.sizes import Size

T = TypeVar("T")


class Pipeline:
    """The stages of this rank. `schedule` is torch's, `stages` are what it runs."""

    def __init__(
        self,
        plan: StagePlan,
        stages: list[TurnStage],
        schedule: Any,
        gradients: Gradients,
        options: Mapping[str, Any],
        budgets: TurnBudgets | None,
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.schedule = schedule
        self.budgets = budgets
        self._gradients = gradients
        self._options = options

    def step(
        self, *batch: torch.Tensor, target: torch.Tensor, losses: list[torch.Tensor] | None = None
    ) -> None:
        """Forward and backward of all micro-batches; every rank gives the whole batch.

        Gradients are in `.grad` then. On the rank of the last stage `losses` gets the loss of each
        micro-batch. Raises `DistributeError` where the batch is not what the plan says.
        """
        self._gradients.attach()
        self._run(self.schedule.step, batch, target, losses)

    def eval(
        self, *batch: torch.Tensor, target: torch.Tensor, losses: list[torch.Tensor] | None = None
    ) -> None:
        """The losses alone."""
        self._run(self.schedule.eval, batch, target, losses)

    def compiled_update(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """What updates the parameters of this rank, and sets gradients to zero."""
        budget = None if self.budgets is None else self.budgets.update
        return compiled_update(optimizer, _within(self._options, self.budgets, budget))

    def _run(
        self,
        run: Callable[..., Any],
        batch: Sequence[torch.Tensor],
        target: torch.Tensor,
        losses: list[torch.Tensor] | None,
    ) -> None:
        for tensor in (*batch, target):
            if tensor.shape[:1] != (self.plan.samples,):
                raise DistributeError(
                    f"a batch of {tensor.shape[0] if tensor.dim() else 'no'} samples, and the plan "
                    f"has {self.plan.micro_batches} micro-batches of {self.plan.micro_batch}; give "
                    f"{self.plan.samples} samples a step (drop_last=True leaves the last few out)"
                )
        is_last = any(stage.is_last for stage in self.stages)
        kept = {"losses": losses} if is_last and losses is not None else {}
        run(*batch, target=target, return_outputs=False, **kept)


def pipeline(
    model: nn.Module,
    plan: str | os.PathLike[str] | StagePlan,
    loss_fn: LossFunction,
    batch: Sequence[torch.Tensor],
    target: torch.Tensor,
    *,
    options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Cut `model` into stages over all ranks, in place, and return what trains it.

    Every rank calls it with the same model, after the process group was initialised and before an
    optimizer is made. `plan` is a `StagePlan`, or the file that `cotrain-compile cluster` has saved
    one to. `batch` is an example of what the model takes in a step, with its `target`; all turns
    are compiled with it. `loss_fn` takes what the model returns and the target of a micro-batch,
    and gives the mean over its samples. `options` are those of this backend; their
    `memory_budget` is what this rank may take.

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
    read = _by_all("", lambda: plan if isinstance(plan, StagePlan) else read_plan(plan))
    samples = (*batch, target)
    same = _signature(model, read, samples)
    _by_all(same, lambda: _refuse_other_batch(samples, read))
    return _by_all(same, lambda: _made(model, read, loss_fn, samples, options or {}))


def read_plan(path: str | os.PathLike[str]) -> StagePlan:
    """The plan of stages in a file: a `StagePlan`, or the fastest pipeline of an `Answer`.

    Raises `FormatError` where it is neither, `OptionError` where the answer has no pipeline.
    """
    if files.kind_of(path) != "answer":
        return files.load(path, StagePlan)
    answer = files.load(path, Answer)
    for strategy in answer.strategies:
        if strategy.stages is not None:
            return strategy.stages
    raise OptionError(
        f"{path} has no pipeline that fits; let `cotrain-compile cluster` judge "
        "--strategies pipeline-gpipe,pipeline-1f1b"
    )


def _made(
    model: nn.Module,
    plan: StagePlan,
    loss_fn: LossFunction,
    batch: Sequence[torch.Tensor],
    options: Mapping[str, Any],
) -> Pipeline:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    schedule_class(plan.schedule, plan.stages, ranks)
    *micro_batch, target = (tensor[: plan.micro_batch].clone() for tensor in batch)
    found = visits(model, plan.split_points, micro_batch)
    own = range(rank, plan.stages, ranks)
    parts = [cut(model, plan.split_points, found, stage) for stage in own]
    for part in parts:
        try_out(part, micro_batch)
    keep(model, plan.split_points, found, set(own))
    gradients = Gradients(model)
    budgets = _budgets(parts, plan, options)
    stages = [
        TurnStage(
            _turns(part, loss_fn, plan, options, budgets, place),
            number,
            plan.stages,
            next(model.parameters()).device,
            micro_batch,
            torch.empty((), device="meta"),
        )
        for place, (number, part) in enumerate(zip(own, parts, strict=True))
    ]
    gradients.attach()
    for stage in stages:
        stage.turns.rehearse(micro_batch, target)
    gradients.detach()
    schedule = make_schedule(plan.schedule, stages, ranks, plan.micro_batches)
    return Pipeline(plan, stages, schedule, gradients, options, budgets)


def _turns(
    part: Part,
    loss_fn: LossFunction,
    plan: StagePlan,
    options: Mapping[str, Any],
    budgets: TurnBudgets | None,
    place: int,
) -> Turns:
    """The turns of the stage that is at `place` among those of this rank."""
    forward = None if budgets is None else budgets.forward[place]
    backward = None if budgets is None else budgets.backward[place]
    return Turns(
        part,
        loss_fn,
        1.0 / plan.micro_batches,
        _within(options, budgets, forward),
        _within(options, budgets, backward),
    )


def _within(
    options: Mapping[str, Any], budgets: TurnBudgets | None, budget: int | None
) -> Mapping[str, Any]:
    if budgets is None or budget is None:
        return options
    home = {"rests_on": "host"} if budgets.rests_on_host else {}
    return {**options, **home, "memory_budget": budget}


def _budgets(
    parts: Sequence[Part], plan: StagePlan, options: Mapping[str, Any]
) -> TurnBudgets | None:
    """None where the rank may take what the device has."""
    if "memory_budget" not in options:
        return None
    size = Size.parse(options["memory_budget"])
    if size.fraction is not None:
        raise OptionError("of a pipeline, memory_budget is a size such as '20GiB', not a share")
    trained = [[p for p in part.module.parameters() if p.requires_grad] for part in parts]
    param_bytes = [sum(p.numel() * p.element_size() for p in own) for own in trained]
    ends = [end for part in parts for end in (part.enters, part.leaves) if end is not None]
    crossing = plan.micro_batches * sum(end.nbytes for end in ends)
    buffers = {id(buffer): buffer for part in parts for buffer in part.module.buffers()}
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in buffers.values())
    budgets = turn_budgets(size.of(0), param_bytes, 2 * crossing + buffer_bytes)
    if budgets.rests_on_host and any(p.is_cuda for own in trained for p in own):
        raise DistributeError(
            "stages whose parameters rest on the host between turns run on the emulated device "
            "alone; on cards, raise memory_budget, or spread the model over more ranks"
        )
    return budgets


def _refuse_other_batch(batch: Sequence[torch.Tensor], plan: StagePlan) -> None:
    for tensor in batch:
        if tensor.dim() == 0 or tensor.shape[0] < plan.micro_batch:
            raise DistributeError(
                f"the plan has micro-batches of {plan.micro_batch} samples, and the example batch "
                f"has a tensor of {tuple(tensor.shape)}; give as many samples as a step has, first"
            )


def _signature(model: nn.Module, plan: StagePlan, batch: Sequence[torch.Tensor]) -> str:
    """Equal on all ranks that are about to train the same."""
    lines = [files.to_json(plan)]
    lines += [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    lines += [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in batch]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _by_all(signature: str, make: Callable[[], T]) -> T:
    """What `make` gives, where it does on every rank, and all of them have the same `signature`.

    Raises its own error, or one that tells of the other ranks.
    """
    made: T | None = None
    error: CotrainError | OSError | None = None
    try:
        made = make()
    except (CotrainError, OSError) as problem:
        error = problem
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (signature, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = [f"rank {rank}: {told}" for rank, (_, told) in enumerate(found) if told is not None]
    if failed:
        raise DistributeError("another rank cannot run its stages: " + "; ".join(failed))
    apart = [str(rank) for rank, (of_rank, _) in enumerate(found) if of_rank != signature]
    if apart:
        raise DistributeError(
            f"ranks {', '.join(apart)} have another plan, model or batch than rank "
            f"{dist.get_rank()}; give all ranks the same file, and build the same model"
        )
    return cast(T, made)
