"""Grid: the ranks of a pipeline, with stages along one dimension of a mesh.

Along "replicate" and "shard" ranks have the same stages and other samples, along "tensor" the same
samples and a part of each layer, along "experts" other samples and a part of the experts, which
work on the tokens of all of them. What replicas exchange beside the graphs of their turns is what
`DistributedDataParallel` would: values of the first one when they begin, its buffers before each
step, and sums of gradients after the last micro-batch, in place.

Divide: what a rank has of its stages where several share them, each a part.

In: the modules of this rank's stages, cut out of a model, and the grid. Along "tensor" layers are
split by torch's styles, along "experts" experts, along "shard" parameters rest in parts, also of
what is divided. The model has what rests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.distribute.ranks import require_dtensor_steps
from cotrain_compile.distribute.shard import shard
from cotrain_compile.errors import DistributeError
from cotrain_compile.pipelining.gathered import GatheredStages

STAGES, REPLICATE, SHARD, TENSOR = "pipeline", "replicate", "shard", "tensor"
EXPERTS = "experts"
_KNOWN = (STAGES, REPLICATE, SHARD, EXPERTS, TENSOR)


class Grid:
    """`rank` of `ranks` is this rank's place among the stages, `replica` that of its samples.

    Without a mesh all ranks of the process group are one pipeline. `group` is that of the ranks of
    this pipeline; `shard` and `tensor` are the parts of the mesh whose ranks have a part each of
    the parameters. Gradients are added up over `summed` ranks beside the graphs.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """Raises `DistributeError` for a mesh that is not one of stages and what is known here."""
        self.mesh = mesh
        self.group: Any = dist.group.WORLD
        self._places = [(rank, 0, 0) for rank in range(dist.get_world_size())]
        if mesh is not None:
            _refuse_other(mesh)
            self.group = mesh.get_group(STAGES)
            self._places = [self._place(mesh, rank) for rank in range(mesh.size())]
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.summed = self._size(REPLICATE) * self._size(EXPERTS)
        self.replicas = self.summed * self._size(SHARD)
        self.replica = self._places[dist.get_rank()][1]
        self.shard, self.tensor = self._along(SHARD), self._along(TENSOR)
        self.experts = self._along(EXPERTS)

    def _place(self, mesh: DeviceMesh, rank: int) -> tuple[int, int, int]:
        """The stage, the replica, and the part of layers of a rank."""
        (found,) = (mesh.mesh == rank).nonzero().tolist()
        at = dict(zip(mesh.mesh_dim_names or (), found, strict=True))
        replica = at.get(REPLICATE, 0) * self._size(SHARD) + at.get(SHARD, 0)
        replica = replica * self._size(EXPERTS) + at.get(EXPERTS, 0)
        return at[STAGES], replica, at.get(TENSOR, 0)

    def _along(self, name: str) -> DeviceMesh | None:
        """The part of the mesh along a dimension; None where there is one rank."""
        return self.mesh[name] if self.mesh is not None and self._size(name) > 1 else None

    def _size(self, name: str) -> int:
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(name)) if self.mesh is not None and name in names else 1

    def all_of_shard(self, own: bool) -> bool:
        """Whether it is so on all ranks that have parts of the same stages."""
        assert self.shard is not None
        found = torch.tensor(int(own), device=self.shard.device_type)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.shard.get_group())
        return bool(found)

    @property
    def sharing(self) -> tuple[int, ...]:
        """The ranks that work on each other's layers or experts of the same stages, this one too.

        No others run the graphs of this rank's turns when it does, so no others agree on them.
        """
        own = self._layers_of(dist.get_rank())
        return tuple(rank for rank in range(len(self._places)) if self._layers_of(rank) == own)

    def _layers_of(self, rank: int) -> tuple[int, int]:
        stage, replica, _ = self._places[rank]
        return stage, replica // self._size(EXPERTS)

    def of_one_replica(self, numbers: Sequence[float]) -> list[float]:
        """Of the numbers of all ranks one for each stage: those of the first pipeline."""
        return [n for n, place in zip(numbers, self._places, strict=True) if place[1:] == (0, 0)]

    def of_replicas(self, losses: Sequence[Sequence[float]]) -> list[float]:
        """Of the losses that ranks have, those of each replica, in their order."""
        both = zip(self._places, losses, strict=True)
        first = [(replica, found) for (_, replica, part), found in both if part == 0]
        ordered = sorted(first, key=lambda each: each[0])
        return [loss for _, found in ordered for loss in found]

    def send_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give `tensors` the values that the first replica has."""
        self._send(list(tensors), (EXPERTS, SHARD, REPLICATE))

    def begin_alike(self, tensors: Iterable[torch.Tensor]) -> None:
        """`send_first`, to the ranks that share layers too; parts are sent to those with the same.

        What is a part has come from the first of those that have one.
        """
        tensors = list(tensors)
        parts = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        self._send(whole, (TENSOR, EXPERTS, SHARD, REPLICATE))
        self._send([part.to_local() for part in parts], (REPLICATE,))

    def add_up(self, gradients: Iterable[torch.Tensor]) -> None:
        """Make `gradients` their sums over all replicas; those of shards are, along these, and
        those of experts, whose tokens came from all."""
        gradients = list(gradients)
        shared = [each for each in gradients if not _of_experts(each)]
        for dimension, summed in ((EXPERTS, shared), (REPLICATE, gradients)):
            over = self._along(dimension)
            if over is not None:
                own = [each.to_local() if isinstance(each, DTensor) else each for each in summed]
                group = over.get_group()
                _await([dist.all_reduce(each, group=group, async_op=True) for each in own])

    def _send(self, tensors: Sequence[torch.Tensor], dimensions: Sequence[str]) -> None:
        for name in dimensions:
            over = self._along(name)
            if over is not None:
                group = over.get_group()
                source = dist.get_global_rank(group, 0)
                whole = [tensor.detach() for tensor in tensors]
                _await([dist.broadcast(each, source, group, async_op=True) for each in whole])


def _refuse_other(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    world = dist.get_world_size()
    if STAGES not in names or not set(names) <= set(_KNOWN) or mesh.size() != world:
        raise DistributeError(
            f"a pipeline of {world} ranks has a mesh of all of them, with the dimension {STAGES!r} "
            f"and others of {', '.join(_KNOWN[1:])}, not {mesh}; "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "replicate")) has two '
            "stages, twice"
        )


def _of_experts(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and EXPERTS in (gradient.device_mesh.mesh_dim_names or ())


def _await(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


def divide(
    stages: Sequence[nn.Module],
    plan: StagePlan,
    grid: Grid,
    tensor_plan: Mapping[str, ParallelStyle],
) -> None:
    """Leave `stages` this rank's part of their layers and experts.

    Raises `DistributeError` for stages that are swapped, and where nothing says what is split.
    """
    if grid.tensor is None and grid.shard is None and grid.experts is None:
        return
    require_dtensor_steps()
    if plan.swapped:
        raise DistributeError(
            "stages that are swapped come to the device as a whole; take swapped=False, or a mesh "
            "of stages and replicas"
        )
    if grid.tensor is not None and not tensor_plan:
        raise DistributeError(
            "the mesh splits layers of stages, and nothing says which; pass tensor_plan=, such as "
            '{"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}'
        )
    for stage in stages:
        for over, dimension in ((grid.tensor, TENSOR), (grid.experts, EXPERTS)):
            splits = _in_stage(stage, along(tensor_plan, dimension))
            if over is not None and splits:
                parallelize_module(stage, over, splits)


def share(stages: Sequence[nn.Module], grid: Grid, *, once: bool) -> GatheredStages | None:
    """Leave each rank of a shard a part of every parameter: gathered once a step, or in each turn.

    Raises `DistributeError` where it has to be in each turn and layers are divided, too.
    """
    if grid.shard is None or grid.mesh is None:
        return None
    if grid.all_of_shard(once):
        gathered = GatheredStages(grid.shard.get_group())
        for stage in stages:
            gathered.add(stage, grid.mesh)
        return gathered
    if grid.tensor is not None or grid.experts is not None:
        raise DistributeError(
            "stages whose layers are divided over other ranks are gathered once a step, and those "
            "of this rank do not fit twice whole beside what rests; raise memory_budget, or take "
            "more stages"
        )
    for stage in stages:
        shard(stage, grid.shard)
    return None


def hand_over(
    model: nn.Module, stages: Sequence[nn.Module], homes: Mapping[int, nn.Parameter]
) -> None:
    """Let `model` have the parameters of `stages`, or where these rest, by their ids."""
    for stage in stages:
        for name, param in stage.named_parameters(remove_duplicate=False):
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._parameters[own] = homes.get(id(param), param)


def along(plan: Mapping[str, ParallelStyle], dimension: str) -> dict[str, ParallelStyle]:
    """The styles of `plan` for that dimension of a mesh: torch's own are for "tensor"."""
    return {
        name: style
        for name, style in plan.items()
        if getattr(style, "dimension", TENSOR) == dimension
    }


def is_called(name: str, pattern: str) -> bool:
    """Whether `parallelize_module` takes the module of that name for `pattern`: part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _in_stage(
    stage: nn.Module, tensor_plan: Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """The layers of `tensor_plan` that this stage has, each by its own name."""
    return {
        name: style
        for name, module in stage.named_modules()
        if next(module.parameters(), None) is not None
        for pattern, style in tensor_plan.items()
        if is_called(name, pattern)
    }
