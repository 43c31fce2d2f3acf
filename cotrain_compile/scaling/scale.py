"""Scale: from the row of a plan to a step that trains, the same for each of them.

`scale(model, plan, loss_fn, batch, target)` is called by every rank, and arranges the ranks as the
row says: replicas, shards, split layers, and what these make together, or stages with replicas.

Wrap: a model becomes what a layout says, on a mesh of all ranks.

Layers are split along `tensor` first, then what is left of each is sharded or replicated over the
other dimensions, as torch wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.distribute.clip import clip_grad_norm
from cotrain_compile.distribute.ranks import note_unequal_batches, require_dtensor_steps
from cotrain_compile.errors import DistributeError, OptionError
from cotrain_compile.pipelining.grid import along
from cotrain_compile.pipelining.pipeline import Pipeline, pipeline
from cotrain_compile.pipelining.together import StageRanks, compared
from cotrain_compile.pipelining.turns import LossFunction
from cotrain_compile.scaling.rows import Plan, RanksRow, read_row
from cotrain_compile.scaling.tensor_plans import expert_plan_of, take_means, tensor_plan_of

# A compiled step: takes a batch and its target, gives the mean loss of this replica's samples.
Step = Callable[..., torch.Tensor]


class Scaled:
    """A model on a `mesh` of ranks, as `layout` arranges them.

    `model` is what a step calls; it is `pipe` that trains where that is not None, and `model` has
    the parameters of this rank's stages.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: DeviceMesh,
        loss_fn: LossFunction,
        options: Mapping[str, Any],
        pipe: Pipeline | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.mesh = mesh
        self.pipe = pipe
        self._loss_fn = loss_fn
        self._options = options

    @property
    def replica(self) -> int:
        """Which of the `replicas` this rank belongs to: its samples are those of that replica."""
        return self.layout.replica(dist.get_rank())

    @property
    def replicas(self) -> int:
        """How many ranks, or groups of ranks, have samples of their own in a step."""
        return self.layout.replicas

    @property
    def _has_experts(self) -> bool:
        return self.layout.experts > 1

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank's optimizer has."""
        return self.model.parameters()

    def compiled_step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        *,
        just_in_time: bool = False,
    ) -> Step:
        """A step by this backend: `step(*batch, target=target)`, of the samples of this replica.

        It returns their mean loss. With `max_norm` gradients are clipped by the norm of the whole
        model. With `just_in_time` each stage of a pipeline is updated as soon as its own last
        backward is through (`Pipeline.step`); what has no stages is updated by its plan in any
        case. Raises as a compiled step and `Pipeline.step` do, and `OptionError` where updates
        cannot be just in time, as the norm is known when all ranks are through.
        """
        if just_in_time and max_norm is not None:
            raise OptionError(
                "just_in_time=True updates a stage before the norm of the whole model is known, by "
                "which max_norm clips; leave one of them out"
            )
        if self.pipe is not None:
            return _step_in_stages(self.pipe, optimizer, max_norm, just_in_time=just_in_time)
        group_name = str(self.mesh.get_group("experts").group_name) if self._has_experts else ""
        step = _step(self.model, self._loss_fn, optimizer, self.layout, max_norm, group_name)
        made: Step = torch.compile(step, backend="cotrain", options=dict(self._options))
        return made


def scale(
    model: nn.Module,
    plan: Plan,
    loss_fn: LossFunction,
    batch: Sequence[torch.Tensor],
    target: torch.Tensor,
    *,
    strategy: str | None = None,
    stages: StagePlan | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    experts: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Scaled:
    """Arrange all ranks as a row of `plan` says, and `model` on them, in place.

    Every rank calls it with the same model, after the process group was initialised and before an
    optimizer is made; all begin with the values of rank 0. `plan` is the file that
    `cotrain-compile cluster` has saved, of which the fastest row counts or the one that `strategy`
    names; or a `Layout`, or the sizes of its dimensions. `loss_fn` takes what the model returns and
    the target, and gives the mean over its samples. `batch` is an example of what a replica gets in
    a step, with its `target`. `options` are those of this backend.

    Where the row has a pipeline, `stages` says where stages begin if the plan does not. Where it
    divides layers, `tensor_plan` has a style of torch's for names of modules, which may have
    wildcards; models of Hugging Face have their own. Where it divides experts, `experts` names the
    modules that have them (`scaling.tensor_plans`).

    Raises `DistributeError`, on every rank, where the plan is for other ranks, is not for this
    model, or is of a kind that is not executed; `OptionError` where it has no such row.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributeError(
            "scale() needs a process group: start the script by torchrun, and call "
            "torch.distributed.init_process_group() before"
        )
    ranks = StageRanks()
    row = ranks.make(lambda: read_row(plan, dist.get_world_size(), strategy, stages))
    splits = ranks.make(lambda: _splits(model, row, tensor_plan, experts))
    compared_batch = () if row.layout.samples else (*batch, target)
    same = compared(model, row.stages, loss_fn, compared_batch)
    ranks.make(lambda: None, [("layout", files.to_json(row.layout)), *same, _told(splits)])
    mesh = mesh_of(row.layout, next(model.parameters()).device)
    begin_alike(model)
    chosen = ({"micro_batch_order": "by-layer"} if row.by_layer else {}) | dict(options or {})
    if row.stages is None:
        made = ranks.make(lambda: wrapped(model, row.layout, mesh, splits))
        return Scaled(made, row.layout, mesh, loss_fn, chosen)
    pipe = pipeline(
        model, row.stages, loss_fn, batch, target, options=chosen, mesh=mesh, tensor_plan=splits,
        sequence=row.layout.sequence,
    )  # fmt: skip
    return Scaled(model, row.layout, mesh, loss_fn, chosen, pipe)


def _splits(
    model: nn.Module,
    row: RanksRow,
    given: Mapping[str, ParallelStyle] | None,
    experts: Sequence[str],
) -> dict[str, ParallelStyle]:
    found: dict[str, ParallelStyle] = {}
    if row.layout.tensor > 1:
        found |= tensor_plan_of(model, given, sequence=row.layout.sequence)
    if row.layout.experts > 1:
        found |= expert_plan_of(model, experts)
    return found


def _told(splits: Mapping[str, ParallelStyle]) -> tuple[str, str]:
    """Layouts that styles have differ in what ranks exchange, which is compared with the step."""
    return "splitting of layers", str({name: type(each).__name__ for name, each in splits.items()})


def _step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    max_norm: float | None,
    experts_group: str,
) -> Step:
    """Gradients are means over replicas: one with more samples than others weighs as much more.

    `experts_group` is the name of the group over which the step takes these means, if there is one.
    """
    samples = layout.samples[layout.replica(dist.get_rank())] if layout.samples else 0
    weight = samples * layout.replicas / layout.step_samples if samples else 1.0

    def step(*batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if samples and len(target) != samples:
            raise DistributeError(
                f"this replica has {samples} of the samples of a step, and the batch {len(target)}"
            )
        optimizer.zero_grad()
        total = torch.zeros((), device=target.device)
        for *part, wanted in zip(
            *(tensor.chunk(layout.micro_batches) for tensor in (*batch, target)), strict=True
        ):
            loss = loss_fn(model(*part), wanted) * (len(wanted) / len(target))
            (loss * weight if samples else loss).backward()
            total = total + loss.detach()
        if experts_group:
            take_means(model.parameters(), experts_group, layout.experts)
        if max_norm is not None:
            clip_grad_norm(model.parameters(), max_norm)
        optimizer.step()
        return total

    if samples:
        note_unequal_batches(step.__code__)
    return step


def _step_in_stages(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    *,
    just_in_time: bool,
) -> Step:
    update = pipe.compiled_update(optimizer)
    first = pipe.replica * pipe.plan.micro_batches

    def step(*batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        early = update if just_in_time else None
        pipe.step(*batch, target=target, losses=losses, update=early)
        if max_norm is not None:
            pipe.clip_grad_norm(max_norm)
        if early is None:
            update()
        return torch.stack(losses[first : first + pipe.plan.micro_batches]).mean()

    return step


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """A mesh of all ranks: the dimensions of `layout` that divide anything.

    Replicas of divided layers or experts are those of one shard each, which `fully_shard` knows.
    """
    sizes = dict(layout.mesh)
    divided = layout.tensor > 1 or layout.experts > 1
    if layout.replicate > 1 and divided and layout.pipeline == 1:
        sizes = {name: size for name, size in layout.sizes.items() if size > 1 or name == "shard"}
    sizes = sizes or {"replicate": 1}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def wrapped(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, splits: Mapping[str, ParallelStyle]
) -> nn.Module:
    """`model`, changed in place, or what wraps it; `splits` has styles of layers or of experts."""
    names = mesh.mesh_dim_names or ()
    for dimension in ("tensor", "experts"):
        if layout.sizes[dimension] > 1:
            require_dtensor_steps()
            parallelize_module(model, mesh[dimension], along(splits, dimension))
    if "shard" in names:
        require_dtensor_steps()
        over = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        for layer in layers_of(model):
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        return model
    return DistributedDataParallel(model) if layout.replicate > 1 else model


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules, which are what models repeat; the outermost ones."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            yield from (layer for layer in module if next(layer.parameters(), None) is not None)
        else:
            yield from layers_of(module)


def begin_alike(model: nn.Module) -> None:
    """Give parameters and buffers of all ranks the values of rank 0."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.detach(), 0)
