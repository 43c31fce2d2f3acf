"""Reuse: the placement that a training already has, scheduled for other sizes of its step.

Rest on host: a plan's placement with everything that outlives the step at home on the host.

In: a plan. Out: one for the same step and budgets that leaves the device empty at its end, as
another step uses it then. What is offloaded or made again within the step stays so; parameters are
fetched for their uses, and updates run on the host where they are.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow, Role
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import casts_once
from cotrain_compile.placement.order.by_layer import OrderIsKept, by_layer
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Placement, Plan, UpdateMode


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
    if placement.casts_once:
        dataflow = casts_once(dataflow)
    persistent = {b.name for b in dataflow.buffers if b.role in PERSISTENT_ROLES}
    groups = {group.param for group in dataflow.updates}
    if set(placement.homes) != persistent or set(placement.updates) != groups:
        return None
    size = placement.layers_per_pack
    try:
        ordered = by_layer(dataflow, size)
    except OrderIsKept:
        ordered, size = dataflow, 0
    offloaded = tuple(name for name in placement.offloaded if name in ordered.buffer)
    may = recomputable(ordered) if placement.recomputed else frozenset()
    again = tuple(name for name in placement.recomputed if name in may)
    reused = replace(
        placement,
        offloaded=offloaded,
        refetched=tuple(name for name in placement.refetched if name in offloaded),
        offloaded_to_disk=tuple(name for name in placement.offloaded_to_disk if name in offloaded),
        recomputed=again,
        recomputed_apart=tuple(name for name in placement.recomputed_apart if name in may),
        layers_per_pack=size,
        splits=splits,
    )
    try:
        return schedule(problem, reused, compiled=compiled)
    except PlacementError:
        return None


def rest_on_host(problem: Problem, plan: Plan, *, compiled: bool = False) -> Plan:
    """`plan` with parameters, states and kept gradients at home on the host.

    Buffers of modules stay where they are. `compiled` is as for `schedule`. Raises `PlacementError`
    where copies for all uses do not fit beside what is made.
    """
    placement = _with_homes_on_host(problem.dataflow, plan.placement)
    return schedule(problem, placement, compiled=compiled)


def _with_homes_on_host(dataflow: Dataflow, placement: Placement) -> Placement:
    moved = {buffer.name for buffer in dataflow.buffers if buffer.role is Role.PARAM}
    moved.update(state for group in dataflow.updates for state in group.states)
    moved.update(name for names in dataflow.kept_gradients.values() for name in names)
    return replace(
        placement,
        homes={**placement.homes, **dict.fromkeys(moved, Tier.HOST)},
        updates={
            param: mode if mode is UpdateMode.STREAMED else UpdateMode.HOST_STREAMED
            for param, mode in placement.updates.items()
        },
    )
