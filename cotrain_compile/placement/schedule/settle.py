"""Settle: tasks are issued where layers end, so that equal layers are cut into equal segments.

In: a placed step, each of its tasks issued in the gap where the scheduler found its lane idle. Out:
the same tasks, each issued where the layer ends that it was issued in, or where it is waited for if
that comes first. Compiled code ends at every task: where tasks stand between the ops of a layer,
each layer falls into pieces of its own, is compiled apart and fuses less
(`docs/decisions/0025-what-a-task-costs.md`).

No tier holds more by it. The source of an offload is held until its wait wherever it is issued, a
fetch takes its memory later, and no wait moves. A task never passes an op that writes what it
copies, nor the issue of one that comes after it. What it may cost is time, which a simulation
tells, with `calls_s` for each stretch of code that there is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import assert_never

from cotrain_compile.analysis.layers import layers_of
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.plan import HostRegion, Task, Transfer

# What the interpreter takes to call a stretch of compiled code: 14 to 17 µs by
# `bench/runtime/issue_cost.py`.
CALL_S = 15e-6


def settled(placed: PlacedStep) -> list[Task]:
    """Its tasks issued where layers end, in their new order of issue."""
    program, tasks = placed.program, placed.tasks
    ends = _layer_ends(program)
    # A task may go as far as the first that comes after it goes, so the last ones go first.
    issued: dict[str, int] = {}
    limit: dict[str, int] = {}
    for task in reversed(tasks):
        before = program.issue_slot(task)
        latest = min(latest_issue(program, task), limit.get(task.name, program.end - 1))
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


def latest_issue(program: DeviceProgram, task: Task) -> int:
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


def calls_s(placed: PlacedStep) -> float:
    """What compiled code takes besides its ops: for each stretch of it a launch and a call."""
    each_s = placed.problem.machine.device.launch_s + CALL_S
    return _stretches(placed.program, placed.tasks) * each_s


def _stretches(program: DeviceProgram, tasks: Sequence[Task]) -> int:
    """How often code begins again: where a layer ends, and where tasks are issued or waited for."""
    cuts = {end + 1 for end in _layer_ends(program)}
    cuts |= {program.issue_slot(task) + 1 for task in tasks}
    cuts |= {program.wait_slot(task) for task in tasks}
    return len(cuts - {0, program.end}) + 1
