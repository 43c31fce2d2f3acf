"""Timetable: the ops that the device runs under a plan, in their order, and when tasks go on.

In: a Dataflow and a Plan. Out: a `Timetable`, or `PlanError` where an op is moved that cannot be,
or a task is issued or waited for where nothing is, or in another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.placement.check.copies import Moment, tick_of
from cotrain_compile.placement.check.rules import require
from cotrain_compile.plan import Plan, Task


@dataclass(frozen=True)
class Timetable:
    """What the device runs; by tick, the tasks that are issued and those that are waited for.

    `waits_before` has the carried tasks of the step before, by name.
    """

    ops: tuple[Op, ...]
    issues: Mapping[int, list[Task]]
    waits: Mapping[int, list[Task]]
    waits_before: Mapping[int, list[str]]

    def where(self, tick: int) -> str:
        """Where in the step a tick is, in words."""
        slot, moment = divmod(tick, len(Moment))
        if slot == len(self.ops):
            return "at the end of the step"
        return f"{'at' if moment == Moment.OP else 'before'} {self.ops[slot].name}"


def timetable(dataflow: Dataflow, plan: Plan) -> Timetable:
    """When the device of `plan` runs which op, issues which task and waits for it."""
    ops = run_order(dataflow, plan)
    slot: dict[str | None, int] = {op.name: index for index, op in enumerate(ops)}
    issues: defaultdict[int, list[Task]] = defaultdict(list)
    waits: defaultdict[int, list[Task]] = defaultdict(list)
    waits_before: defaultdict[int, list[str]] = defaultdict(list)
    latest = 0
    for task in plan.tasks:
        for place in (task.issue_after, task.wait_before):
            require(
                place is None or place in slot,
                f"{task.name} names {place}, which the device does not run",
            )
        gap = 0 if task.issue_after is None else slot[task.issue_after] + 1
        require(gap >= latest, f"{task.name} is listed after a task that is issued later")
        latest = gap
        issue = tick_of(gap, Moment.FETCH if task.is_fetch else Moment.ISSUE)
        issues[issue].append(task)
        if task.carried:
            waits_before[tick_of(slot[task.wait_before], Moment.DONE)].append(task.name)
            continue
        gap = len(ops) if task.wait_before is None else slot[task.wait_before]
        wait = tick_of(gap, Moment.OFFLOADS_DONE if task.is_offload else Moment.DONE)
        require(issue < wait, f"{task.name} is waited for before its issue")
        waits[wait].append(task)
    return Timetable(ops, issues, waits, waits_before)


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
