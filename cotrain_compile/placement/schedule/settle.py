"""Settle: tasks are issued where layers end, so that equal layers are cut into equal segments.

In: the tasks of a plan, each issued in the gap where the scheduler found its lane idle. Out: the
same tasks, each issued where the layer ends that it was issued in, or where it is waited for if
that comes first. Compiled code ends at every task: where tasks stand between the ops of a layer,
each layer falls into pieces of its own, is compiled apart and fuses less
(`docs/decisions/0025-what-a-task-costs.md`).

No tier holds more by it. The source of an offload is held until its wait wherever it is issued, a
fetch takes its memory later, and no wait moves. A task never passes an op that writes what it
copies, nor the issue of one that comes after it. What it may cost is time, which a simulation
tells.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import assert_never

from cotrain_compile.analysis.layers import layers_of
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import DeviceProgram, device_program
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer


def settled(program: DeviceProgram, tasks: Sequence[Task]) -> list[Task]:
    """`tasks` issued where layers end, in their new order of issue."""
    ends = _layer_ends(program)
    # A task may go as far as the first that comes after it goes, so the last ones go first.
    issued: dict[str, int] = {}
    limit: dict[str, int] = {}
    for task in reversed(tasks):
        before = program.issue_slot(task)
        latest = min(_latest(program, task), limit.get(task.name, program.end - 1))
        end = ends[bisect_left(ends, before)] if before <= ends[-1] else before
        slot = issued[task.name] = max(before, min(end, latest))
        for name in task.after:
            limit[name] = min(limit.get(name, slot), slot)
    order = sorted(range(len(tasks)), key=lambda number: (issued[tasks[number].name], number))
    return [_issued_after(program, tasks[n], issued[tasks[n].name]) for n in order]


def _layer_ends(program: DeviceProgram) -> list[int]:
    """Slots of the last ops of layers, ascending; the last one is the last of the step."""
    layer = layers_of(program.dataflow)
    computing = [slot for slot, op in enumerate(program.ops) if op.writes]
    names = [layer[program.ops[slot].name] for slot in computing]
    ends = [slot for slot, (a, b) in zip(computing, pairwise(names), strict=False) if a != b]
    return [*ends, program.end - 1]


def _latest(program: DeviceProgram, task: Task) -> int:
    """The last slot after which `task` may be issued: right before its wait, or its next write."""
    latest = program.end - 1 if task.carried else program.wait_slot(task) - 1
    before = program.issue_slot(task)
    for name in _touched_on_device(task):
        touched = program.touches.get(name, [])
        for slot in touched[bisect_left(touched, before + 1) :]:
            if slot > latest:
                break
            if name in program.ops[slot].writes or not task.is_offload:
                return min(latest, slot - 1)
    return max(before, latest)


def _touched_on_device(task: Task) -> tuple[str, ...]:
    match task:
        case Transfer():
            return task.buffer, task.destination
        case HostRegion():
            return ()
        case _:
            assert_never(task)


def _issued_after(program: DeviceProgram, task: Task, slot: int) -> Task:
    if slot == program.issue_slot(task):
        return task
    return replace(task, issue_after=program.ops[slot].name)


def settled_plan(problem: Problem, plan: Plan) -> Plan:
    """`plan` with its tasks settled, where a step is not predicted to lose more than it gains.

    What it gains is counted as one launch for every place between ops of one layer at which a task
    stands no more: compiled code begins again behind it.
    """
    problem = problem.under(plan.placement)
    program = device_program(problem.dataflow, plan.placement, plan.moved)
    if not plan.tasks or not program.ops:
        return plan
    tasks = settled(program, plan.tasks)
    fewer = _places(plan.tasks) - _places(tasks)
    predicted = predict(problem, plan.placement, tasks, plan.moved)
    longer_s = predicted.makespan_s - plan.predicted.makespan_s
    if fewer <= 0 or longer_s > fewer * problem.machine.device.launch_s:
        return plan
    return replace(plan, tasks=tuple(tasks), predicted=predicted)


def _places(tasks: Sequence[Task]) -> int:
    return len({task.issue_after for task in tasks})
