"""Divide: what a rank has of its stages where several share them, each a part.

In: the modules of this rank's stages, cut out of a model, and the grid. Along "tensor" layers are
split by torch's styles, along "shard" parameters rest in parts. Model and modules have the same
parameters afterwards, as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.distribute.ranks import require_dtensor_steps
from cotrain_compile.distribute.shard import shard
from cotrain_compile.errors import DistributeError
from cotrain_compile.pipelining.grid import Grid


def divide(
    model: nn.Module,
    stages: Sequence[nn.Module],
    plan: StagePlan,
    grid: Grid,
    tensor_plan: Mapping[str, ParallelStyle],
) -> None:
    """Leave `stages`, and `model`, this rank's part of their parameters.

    Raises `DistributeError` for stages that are swapped, and where nothing says what is split.
    """
    if grid.tensor is None and grid.shard is None:
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
        if grid.tensor is not None:
            splits = _in_stage(stage, tensor_plan)
            if splits:
                parallelize_module(stage, grid.tensor, splits)
        if grid.shard is not None:
            shard(stage, grid.shard)
        for name, param in stage.named_parameters():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._parameters[own] = param


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
