"""Run order: the ops that the device runs under a plan, in their order.

In: a Dataflow and a Plan. Out: the ops, or `PlanError` where one is moved that cannot be.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.placement.check.rules import require
from cotrain_compile.plan import Plan


def run_order(dataflow: Dataflow, plan: Plan) -> tuple[Op, ...]:
    """The ops that the device runs, in order."""
    position = dataflow.position
    on_host = {name for region in plan.host_regions for name in region.ops}
    moved = [name for entry in plan.moved for name in entry.ops]
    require(len(set(moved)) == len(moved), "an op is moved twice")
    for name in moved:
        require(name in position, f"{name} is moved, which the step has not")
        require(name not in on_host, f"{name} is moved, but it runs on the host")
    elsewhere = on_host.union(moved)
    behind: dict[str | None, list[str]] = {}
    for entry in plan.moved:
        known = entry.after is None or entry.after in position
        stays = known and entry.after not in elsewhere
        require(stays, f"ops are moved behind {entry.after}, which is not at its place")
        behind.setdefault(entry.after, []).extend(entry.ops)
    order = [*behind.get(None, ())]
    for op in dataflow.ops:
        if op.name not in elsewhere:
            order += [op.name, *behind.get(op.name, ())]
    return tuple(dataflow.ops[position[name]] for name in order)
