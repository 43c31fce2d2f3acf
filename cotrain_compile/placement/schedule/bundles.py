"""Bundles: small tasks that are carried out as one, so that Python starts one in place of many.

In: the tasks of a plan. Out: the same, those that may be joined with one `bundle`: copies of one
direction, or updates on the host. A bundle is issued where the last of its members was, and waited
for where the first of them was. So its members are joined as far as each may be issued that late
(`latest_issue`), also by those that come after it. What rests on the host and is fetched
once is fetched where the first of its bundle was: each of them earlier than by itself.

So the device holds more than without bundles only where something is fetched earlier; on the host
the values inside the updates of a bundle are there at once (`host_memory.host_bytes`). The cost
is time, which a simulation tells: a copy begins later, and what comes after a member comes after
all of them.

Settle: tasks are issued where layers end, so that equal layers are cut into equal segments.

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

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import assert_never

from cotrain_compile.analysis.layers import layers_of
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.plan import HostRegion, Task, Transfer

# What takes less than to start a task: the time of so many bytes, on any link or host.
SMALL_BYTES = 64 << 10
# Together they take so little that no other task waits for them for long.
MOST_BYTES = 1 << 20
# Fewer save too little to be told apart from others.
FEWEST = 8


@dataclass(frozen=True)
class _Window:
    """A task by its number: the slots after which it may be issued, is by itself, is awaited."""

    number: int
    first: int
    own: int
    last: int
    wait: int
    nbytes: int


@dataclass(frozen=True)
class _Spot:
    """Where a task is: the slots after which it is issued, may be at the latest, is awaited.

    Those of one `kind` may be joined; None for one that goes by itself.
    """

    task: Task
    own: int
    latest: int
    wait: int
    nbytes: int
    may_be_earlier: bool
    kind: object | None


class Bundler:
    """The tasks of a program, each by itself so far."""

    def __init__(self, program: DeviceProgram, tasks: Sequence[Task]) -> None:
        self._program, self._tasks = program, tasks
        # An update on guesses is not to wait for a bundle, nor come behind what it goes ahead of.
        guessed = any(isinstance(task, HostRegion) and task.guesses for task in tasks)
        dataflow = program.dataflow
        fetches = Counter(t.buffer for t in tasks if isinstance(t, Transfer) and t.is_fetch)
        self._spots = [
            _Spot(
                task,
                program.issue_slot(task),
                latest_issue(program, task),
                program.wait_slot(task),
                nbytes := _nbytes(dataflow, task),
                _may_be_earlier(dataflow, task, fetches),
                None if guessed else _kind(dataflow, task, nbytes),
            )
            for task in tasks
        ]

    def within(self, reach: int) -> list[Task] | None:
        """The tasks in bundles, in their new order of issue; None where nothing may be joined.

        No task is issued more than `reach` ops later than it was, or earlier.
        """
        if all(spot.kind is None for spot in self._spots):
            return None
        windows = _windows(self._spots, reach, self._program.end)
        kinds: dict[object, list[_Window]] = {}
        for spot, window in zip(self._spots, windows, strict=True):
            if spot.kind is not None:
                kinds.setdefault(spot.kind, []).append(window)
        groups = [g for kind in kinds.values() for g in _groups(kind) if len(g) >= FEWEST]
        return _ordered(self._program, self._tasks, windows, groups) if groups else None


def _kind(dataflow: Dataflow, task: Task, nbytes: int) -> object | None:
    """Equal for tasks that may be joined; None for one that goes by itself."""
    if task.deferred or task.after_previous or nbytes > SMALL_BYTES:
        return None
    match task:
        case Transfer():
            is_kept = bool(dataflow.buffer[task.buffer].param)  # the user's
            alone = is_kept or task.buffer in dataflow.pieces.wholes
            return None if alone else (task.direction, bool(task.destination))
        case HostRegion():
            return None if task.makes or task.guesses or task.confirms else "update"
        case _:
            assert_never(task)


def _nbytes(dataflow: Dataflow, task: Task) -> int:
    """Of a copy, or of the largest value that an update touches or makes."""
    match task:
        case Transfer():
            return task.nbytes
        case HostRegion():
            ops = [dataflow.ops[dataflow.position[name]] for name in task.ops]
            names = {name for op in ops for name in (*op.reads, *op.writes)}
            return max(dataflow.buffer[name].nbytes for name in names)
        case _:
            assert_never(task)


def _windows(spots: Sequence[_Spot], reach: int, end: int) -> list[_Window]:
    last: dict[str, int] = {}
    for spot in reversed(spots):
        own = min(spot.latest, spot.own + reach, last.get(spot.task.name, end - 1))
        last[spot.task.name] = own
        for name in spot.task.after:
            last[name] = min(last.get(name, end - 1), own)
    return [
        _Window(
            number,
            max(-1, spot.own - reach) if spot.may_be_earlier else spot.own,
            spot.own,
            max(last[spot.task.name], spot.own),
            spot.wait,
            spot.nbytes,
        )
        for number, spot in enumerate(spots)
    ]


def _may_be_earlier(dataflow: Dataflow, task: Task, fetches: Counter[str]) -> bool:
    """Whether `task` fetches what has been on the host since before the step, the only time."""
    if not isinstance(task, Transfer) or not task.is_fetch:
        return False
    return dataflow.buffer[task.buffer].is_input and not task.after and fetches[task.buffer] == 1


def _groups(windows: Sequence[_Window]) -> list[list[_Window]]:
    """Those that have a slot in common, in their order; no more than `MOST_BYTES` together."""
    found: list[list[_Window]] = []
    last = nbytes = 0
    for window in windows:
        nbytes += window.nbytes
        if found and window.first <= last and nbytes <= MOST_BYTES:
            found[-1].append(window)
            last = min(last, window.last)
        else:
            found.append([window])
            last, nbytes = window.last, window.nbytes
    return found


def _ordered(
    program: DeviceProgram,
    tasks: Sequence[Task],
    windows: Sequence[_Window],
    groups: Sequence[Sequence[_Window]],
) -> list[Task] | None:
    """`tasks` with these `groups` as bundles; None where one would be issued too late for it.

    A task follows what it comes after, so one bundle may push others back.
    """
    of = {window.number: group for group in groups for window in group}
    units = [*groups, *([w] for w in windows if w.number not in of)]
    unit_of = {w.number: place for place, unit in enumerate(units) for w in unit}
    number_of = {task.name: number for number, task in enumerate(tasks)}
    before: list[set[int]] = [
        {unit_of[number_of[name]] for w in unit for name in tasks[w.number].after} for unit in units
    ]
    issued = [max(max(w.first for w in unit), min(w.own for w in unit)) for unit in units]
    order = _in_order(issued, [max(w.number for w in unit) for unit in units], before)
    if len(order) < len(units) or any(issued[p] > w.last for p in order for w in units[p]):
        return None
    found: list[Task] = []
    for place in order:
        unit = sorted(units[place], key=lambda w: w.number)
        found += _joined(program, [tasks[w.number] for w in unit], unit, issued[place])
    return found


def _in_order(issued: list[int], numbers: Sequence[int], before: Sequence[set[int]]) -> list[int]:
    """The places of units in their order of issue: behind what they come after, else as they were.

    `issued` has the slot of each, which may become a later one. Units that wait for each other are
    left out.
    """
    behind: list[list[int]] = [[] for _ in before]
    left = [len(places) for places in before]
    for place, earlier in enumerate(before):
        for other in earlier:
            behind[other].append(place)
    ready = [(issued[p], numbers[p], p) for p in range(len(before)) if not left[p]]
    heapq.heapify(ready)
    order, slot = list[int](), -1
    while ready:
        _, _, place = heapq.heappop(ready)
        slot = issued[place] = max(slot, issued[place])
        order.append(place)
        for other in behind[place]:
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, (max(issued[other], slot), numbers[other], other))
    return order


def _joined(
    program: DeviceProgram, tasks: Sequence[Task], unit: Sequence[_Window], slot: int
) -> list[Task]:
    """The tasks of a unit, issued after the op in `slot`."""
    issue = program.ops[slot].name if slot >= 0 else None
    if len(tasks) == 1:
        return [tasks[0].between(issue, tasks[0].wait_before)]
    wait = min(w.wait for w in unit)
    before = program.ops[wait].name if wait < program.end else None
    return [
        replace(task, issue_after=issue, wait_before=before, bundle=tasks[0].name) for task in tasks
    ]


def alone(tasks: Sequence[Task]) -> list[Task]:
    """`tasks`, each by itself."""
    return [replace(task, bundle="") if task.bundle else task for task in tasks]


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
    latest = program.end - 1 if task.deferred else program.wait_slot(task) - 1
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
    return task.between(program.ops[slot].name, task.wait_before)


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
