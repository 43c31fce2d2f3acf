"""Reuse: the placement that a training already has, scheduled for other sizes of its step."""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow import PERSISTENT_ROLES
from cotrain_compile.errors import PlacementError
from cotrain_compile.placement.order.by_layer import OrderIsKept, by_layer
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.rewrite import recomputable
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Placement, Plan


def reuse_placement(
    problem: Problem, placement: Placement, *, compiled: bool = False
) -> Plan | None:
    """A plan with the homes and updates of `placement`; None where they do not fit `problem`.

    Homes that stay spare the moves between them, and a new trace: Dynamo checks on which device a
    tensor is. `compiled` is as for `schedule`. Activations that `problem` does not know stay on the
    device, as those do that cannot be made again in it; its micro-batches run as it has them where
    they cannot run by layer.
    """
    regions = {region.name for region in problem.dataflow.regions}
    splits = placement.splits if regions.issuperset(placement.splits) else {}
    dataflow = split_regions(problem.dataflow, splits)
    persistent = {b.name for b in dataflow.buffers if b.role in PERSISTENT_ROLES}
    groups = {group.param for group in dataflow.updates}
    if set(placement.homes) != persistent or set(placement.updates) != groups:
        return None
    away = tuple(name for name in placement.away if name in dataflow.buffer)
    size = placement.layers_per_pack
    try:
        ordered = by_layer(dataflow, size)
    except OrderIsKept:
        ordered, size = dataflow, 0
    may = recomputable(ordered) if placement.recomputed else frozenset()
    again = tuple(name for name in placement.recomputed if name in may)
    reused = replace(placement, away=away, recomputed=again, layers_per_pack=size, splits=splits)
    try:
        return schedule(problem, reused, compiled=compiled)
    except PlacementError:
        return None
