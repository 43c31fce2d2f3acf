"""Rest on host: a plan's placement with everything that outlives the step at home on the host.

In: a plan. Out: one for the same step and budgets that leaves the device empty at its end, as
another step uses it then. What is away or made again within the step stays so; parameters are
fetched for their uses, and updates run on the host where they are.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Placement, Plan, UpdateMode


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
