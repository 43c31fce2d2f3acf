"""Predict: what a placed step with its tasks takes, as a Timeline from the simulator.

An update of what rests on disk is works on the host and the drive. It reads pieces ahead of its
turn, as far as there are rooms, updates each when it has come, and writes it back beside the next.
Casts and fetches read so, too, and offloads write. Here each goes in a few parts of several pieces:
that is enough for them to overlap as they do when all pieces are counted.

In the steady state a step is repeated until each is like the one before, with the tasks that are
carried into the next one. Its makespan is the period: what training takes for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, assert_never

from cotrain_compile.dataflow import Op
from cotrain_compile.machine import Contention, Machine, Tier
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.placement.simulate.engine import (
    LaneSpec,
    Periodic,
    Work,
    makespan_s,
    simulate,
    steady_state,
)
from cotrain_compile.plan import (
    HostRegion,
    Lane,
    Task,
    Transfer,
    carried_out,
)
from cotrain_compile.plan.on_disk import PIECE_BYTES, THREADS, read_for_update, resting
from cotrain_compile.plan.timeline import Span, Timeline, exchange_of

# In how many parts an update goes at most.
PARTS = 4
# A part is read when this many before it have been written: the others fill the rooms.
AHEAD = 3


class FromDisk:
    """The works of what reads from disk, in their order of issue, which is that of the drive's."""

    def __init__(self, placed: PlacedStep) -> None:
        self._placed, self._machine = placed, placed.problem.machine
        homes = placed.placement.homes.items()
        self._on_disk = {name for name, tier in homes if tier is Tier.DISK}
        self._on_disk |= set(placed.placement.offloaded_to_disk)
        self._written: list[str] = []  # of all parts of updates so far
        self._used: list[str] = []  # of all parts of casts and fetches
        self._stored: list[str] = []  # of all parts of offloads

    def works_of(self, task: Task, work: Work, begins: tuple[str, ...]) -> Iterator[Work]:
        """`work`, which is all of `task`, with its reads and writes where it has any.

        An update `begins` to read where it is issued, and holds the host until its last write. What
        a cast or a fetch reads may be what a task has written that it comes after.
        """
        if task.is_offload:
            yield from self._stores(task, work)
            return
        names, written = self._read_by(task)
        if not names:
            yield work
            return
        is_update, name = isinstance(task, HostRegion) and not task.makes, work.name
        parts = self._parts(names)
        read_s, write_s = self._read_s(names) / parts, self._write_s(written) / parts
        passed = self._written if is_update else self._used
        for part in range(parts):
            is_last = part == parts - 1
            read, write = f"read.{part}.{name}", f"write.{part}.{name}"
            use = name if is_last else f"{part}.{name}"
            room = passed[-AHEAD : len(passed) - AHEAD + 1]
            first = begins if is_update else work.after
            yield Work(read, Lane.DISK_READ, read_s, (*first, *room), work.after_previous)
            before = work.after if part == 0 else (f"{part - 1}.{name}",)
            seconds = work.seconds / parts
            yield Work(use, work.lane, seconds, (*before, read), work.after_previous)
            if is_update:
                yield Work(write, Lane.DISK_WRITE, write_s, (use,))
            passed.append(write if is_update else use)

    def _stores(self, task: Task, work: Work) -> Iterator[Work]:
        """An offload to disk: each part is written when it has crossed the link to a room."""
        names = [task.buffer] if isinstance(task, Transfer) and task.buffer in self._on_disk else []
        if not names:
            yield work
            return
        parts, name = self._parts(names), work.name
        for part in range(parts):
            down = f"down.{part}.{name}"
            room = self._stored[-AHEAD : len(self._stored) - AHEAD + 1]
            before = work.after if part == 0 else (f"down.{part - 1}.{name}",)
            yield Work(down, work.lane, work.seconds / parts, (*before, *room), work.after_previous)
            write = name if part == parts - 1 else f"{part}.{name}"
            yield Work(write, Lane.DISK_WRITE, self._write_s(names) / parts, (down,))
            self._stored.append(write)

    def _parts(self, names: Sequence[str]) -> int:
        return min(PARTS, -(-max(self._sizes(names)) // PIECE_BYTES))

    def _sizes(self, names: Sequence[str]) -> list[int]:
        return [self._placed.dataflow.buffer[name].nbytes for name in names]

    def _read_s(self, names: Sequence[str]) -> float:
        """Seconds to read all of what is called so, piece by piece."""
        moved = self._machine.copy_s(sum(self._sizes(names)), Tier.DISK, Tier.HOST, copies=0)
        return moved + self._latency_s(names)

    def _write_s(self, names: Sequence[str]) -> float:
        """The same to write it."""
        moved = self._machine.copy_s(sum(self._sizes(names)), Tier.HOST, Tier.DISK, copies=0)
        return moved + self._latency_s(names)

    def _latency_s(self, names: Sequence[str]) -> float:
        """Once, and for what is missing of whole pieces.

        A rate is of whole ones, `THREADS` at a time, which hide what it takes to begin one.
        """
        missing = sum(-nbytes % PIECE_BYTES for nbytes in self._sizes(names)) / PIECE_BYTES
        return self._machine.links[Lane.DISK_READ].latency_s * (1 + missing / THREADS)

    def _read_by(self, task: Task) -> tuple[Sequence[str], Sequence[str]]:
        """What `task`, which is no offload, reads from disk, and what of it is written there."""
        placement = self._placed.placement
        match task:
            case Transfer():
                read = (task.buffer,) if task.is_fetch else ()
            case HostRegion() if task.makes:
                read = (task.param,)
            case HostRegion():
                group = self._placed.dataflow.update[task.param]
                if task.guesses:
                    return (), ()
                return read_for_update(placement, group), resting(placement, group)
            case _:
                assert_never(task)
        return tuple(name for name in read if name in self._on_disk), ()


# What starting a task takes for each further member of a bundle, of a task by itself: the mean of
# copies down, copies up and updates on the emulated device (`python -m bench.runtime.issue_cost`).
MEMBER = 0.31


def step_s(placed: PlacedStep) -> float:
    """Seconds of one step, as `predict` has them; quicker, for comparing plans."""
    works = joined_works_of(placed)
    if any(task.deferred for task in placed.tasks):
        return timeline_of(placed, works).makespan_s
    machine = placed.problem.machine
    return makespan_s(works, lanes_of(machine), machine.contention)


def predict(placed: PlacedStep) -> Timeline:
    """The timeline of one step. Its device peak is exact for the traced shapes; times are modelled.

    Where tasks are deferred it is a step in the steady state, see `steady`. Host memory is an upper
    bound, see `host_memory.host_bytes`.
    """
    timeline = timeline_of(placed, works_of(placed))
    device, host = placed.device_bytes, placed.host_bytes
    is_allowed = Tier.DISK in placed.problem.budgets
    on_disk = {Tier.DISK: placed.disk_bytes} if is_allowed else {}
    return replace(
        timeline,
        peak_bytes={Tier.DEVICE: max(device, default=0), Tier.HOST: host, **on_disk},
        memory={Tier.DEVICE: _curve(timeline, placed.program, device), Tier.HOST: ((0.0, host),)},
    )


def predict_steady_state(placed: PlacedStep, *, steps: int = 8) -> Periodic:
    """The step repeated: seconds of the first one, and seconds from one to the next.

    A step is complete when it returns, but for the tasks it carries into the next one.
    """
    machine = placed.problem.machine
    endless = repeatable(works_of(placed), placed.tasks)
    return steady_state(endless, lanes_of(machine), machine.contention, steps=steps)


def timeline_of(placed: PlacedStep, works: Sequence[Work]) -> Timeline:
    """When the `works` of a step run; where tasks are deferred, of one in the steady state."""
    machine = placed.problem.machine
    lanes, contention = lanes_of(machine), machine.contention
    if any(task.deferred for task in placed.tasks):
        return steady_step(works, placed.tasks, lanes, contention)
    return simulate(works, lanes, contention)


def task_s(problem: Problem, task: Task) -> float:
    """Seconds of a task by itself; what was done on guesses is right."""
    match task:
        case Transfer():
            is_first = task.bundle in ("", task.name)  # the link is asked once for a bundle
            return problem.machine.copy_s(task.nbytes, *task.ends, copies=int(is_first))
        case HostRegion():
            if task.makes:
                return problem.host_cast_s(task.ops)
            update_s = problem.costs.host_update_s[task.param]
            if task.guesses:
                return problem.saving_s(task.param) + update_s
            return 0.0 if task.confirms else update_s
        case _:
            assert_never(task)


def works_of(
    placed: PlacedStep, seconds_of: Callable[[Problem, Task], float] = task_s
) -> list[Work]:
    """The step as works: device ops in order, each after the tasks waited for before it.

    What is deferred is waited for by ops of the next step, as `engine.repeat` joins them.
    Issuing tasks holds up the op that follows, see `held_up_s`. An exchange with other ranks begins
    behind its op.
    """
    on_device = _on_device(placed)
    device = [on_device.work(op, seconds, op) for op, seconds in on_device.seconds.items()]
    return [*device, *_elsewhere(placed, seconds_of)]


def joined_works_of(
    placed: PlacedStep, seconds_of: Callable[[Problem, Task], float] = task_s
) -> list[Work]:
    """As `works_of`, with every run of device ops that nothing else touches made one.

    It is named as the last of them.
    """
    others = _elsewhere(placed, seconds_of)
    on_device = _on_device(placed)
    # Another run of ops begins at what comes after something, and behind what something awaits.
    slot, names = placed.program.slot, [*on_device.seconds]
    begins = {slot[name] for name in on_device.after.keys() | on_device.after_previous.keys()}
    begins |= {slot[name] + 1 for work in others for name in work.after if name in slot}
    seconds = [*on_device.seconds.values()]
    works = [
        on_device.work(names[end - 1], sum(seconds[begin:end], 0.0), names[begin])
        for begin, end in pairwise(sorted({0, *begins, len(names)}))
    ]
    return [*works, *others]


@dataclass(frozen=True)
class _OnDevice:
    """Seconds by op of the device, in order; what those come after that come after anything.

    And what they come after that the step before them has left.
    """

    seconds: Mapping[str, float]
    after: Mapping[str, tuple[str, ...]]
    after_previous: Mapping[str, tuple[str, ...]]

    def work(self, name: str, seconds: float, first: str) -> Work:
        """The work called `name` that begins with op `first`."""
        after, after_previous = self.after.get(first, ()), self.after_previous.get(first, ())
        return Work(name, Lane.DEVICE, seconds, after, after_previous)


def _on_device(placed: PlacedStep) -> _OnDevice:
    problem, program, tasks = placed.problem, placed.program, placed.tasks
    waits: dict[str, tuple[str, ...]] = {}
    deferred: dict[str, tuple[str, ...]] = {}
    for task in tasks:
        if task.wait_before is not None:
            waiting = deferred if task.deferred else waits
            waiting[task.wait_before] = (*waiting.get(task.wait_before, ()), task.name)
    for op in program.ops if problem.costs.network_s else ():
        if awaited := _awaited(problem, op):
            waits[op.name] = (*waits.get(op.name, ()), *awaited)
    device_s = problem.costs.device_s
    seconds = {name: device_s[name] for name in program.slot}
    if problem.machine.issue_s:
        held_s = held_up_s(problem, program, _starts(program.order.following, tasks))
        seconds |= {name: seconds[name] + more_s for name, more_s in held_s.items()}
    return _OnDevice(seconds, waits, deferred)


def _elsewhere(placed: PlacedStep, seconds_of: Callable[[Problem, Task], float]) -> list[Work]:
    """Exchanges and tasks."""
    problem, program, tasks = placed.problem, placed.program, placed.tasks
    freeing: dict[str | None, list[str]] = {}
    for task in tasks:
        if task.is_offload:
            freeing.setdefault(task.wait_before, []).append(task.name)
    following = program.order.following
    works: list[Work] = []
    for op in program.ops if problem.costs.network_s else ():
        if op.name in problem.costs.network_s:
            seconds = problem.costs.network_s[op.name]
            works.append(Work(exchange_of(op.name), Lane.NETWORK, seconds, (op.name,)))
    ahead = _ahead_in_bundles(tasks)
    from_disk = FromDisk(placed) if placed.placement.uses_disk else None
    for task in tasks:
        begins = () if task.issue_after is None else (task.issue_after,)
        # A fetched copy takes its memory after what is freed before the same op.
        freed = freeing.get(following[task.issue_after], ()) if task.is_fetch else ()
        own = ahead.get(task.name, task.after)
        after = (*begins, *own, *freed)
        if len(after) > 1:
            after = tuple(dict.fromkeys(after))
        work = Work(task.name, task.lane, seconds_of(problem, task), after, task.after_previous)
        works += from_disk.works_of(task, work, begins) if from_disk else [work]
    return works


def issuing_s(placed: PlacedStep) -> float:
    """Seconds of a step in which the device waits for Python to start tasks, at most."""
    starts = _starts(placed.program.order.following, placed.tasks)
    return sum(held_up_s(placed.problem, placed.program, starts).values())


def starts_of(tasks: Sequence[Task]) -> float:
    """How many tasks Python starts in the time that it takes to start these."""
    return sum(1 + (len(unit) - 1) * MEMBER for unit in carried_out(tasks))


def _starts(following: Mapping[str | None, str | None], tasks: Sequence[Task]) -> dict[Any, float]:
    """The same by the op before which they are started."""
    starts: dict[Any, float] = {}
    for unit in carried_out(tasks):
        before = following[unit[0].issue_after]
        starts[before] = starts.get(before, 0.0) + starts_of(unit)
    return starts


def held_up_s(
    problem: Problem, program: DeviceProgram, issued: Mapping[str | None, float]
) -> dict[str, float]:
    """For how long each op is held up because `issued` tasks are started right before it.

    A device that runs ahead of Python stands still only where it would be done with all before
    sooner than Python, which starts one task after the other. When that is, is known but for its
    waits; they are left out, so it stands still no longer than said here.
    """
    each_s, runs_ahead = problem.machine.issue_s, problem.machine.runs_ahead
    if not each_s:
        return {}
    held_s: dict[str, float] = {}
    device_s = python_s = 0.0
    slot, seconds = program.slot, [problem.costs.device_s[name] for name in program.slot]
    behind = 0  # the ops that `device_s` has counted
    for name in sorted((name for name in issued if name in slot), key=slot.__getitem__):
        device_s, behind = sum(seconds[behind : slot[name]], device_s), slot[name]
        python_s = (python_s if runs_ahead else device_s) + each_s * issued[name]
        held_s[name] = max(0.0, python_s - device_s)
        device_s += held_s[name]
    return held_s


def _ahead_in_bundles(tasks: Sequence[Task]) -> dict[str, tuple[str, ...]]:
    """What each member of a bundle comes after: the first after all that any does, then in turn.

    One worker does them; a member that is waited for is waited for with all behind it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for unit in carried_out(tasks):
        if len(unit) > 1:
            found[unit[0].name] = tuple(dict.fromkeys(n for task in unit for n in task.after))
            found |= {task.name: (before.name,) for before, task in pairwise(unit)}
    return found


def _awaited(problem: Problem, op: Op) -> tuple[str, ...]:
    return (exchange_of(op.awaits),) if op.awaits in problem.costs.network_s else ()


def lanes_of(machine: Machine) -> Sequence[LaneSpec]:
    """A lane for each processor, with its workers, and one for each direction of each link."""
    return tuple(LaneSpec(name, workers) for name, workers in machine.lanes.items())


def _curve(
    timeline: Timeline, program: DeviceProgram, nbytes: Sequence[int]
) -> tuple[tuple[float, int], ...]:
    """Bytes over time: slot i begins when op i starts."""
    starts = {span.name: span.start_s for span in timeline.lane(Lane.DEVICE)}
    points: list[tuple[float, int]] = []
    for op, size in zip(program.ops, nbytes, strict=False):
        if not points or points[-1][1] != size:
            points.append((starts[op.name], size))
    points.append((timeline.makespan_s, nbytes[-1]))
    return tuple(points)


END = "end of step"
# What is deferred is waited for in the next step, so that the first few steps tell all.
STEPS = 6


def repeatable(works: Sequence[Work], tasks: Sequence[Task]) -> list[Work]:
    """`works` of which each step begins when all of the one before is done that is not deferred."""
    end = Work(END, Lane.DEVICE, 0.0, after=tuple(t.name for t in tasks if not t.deferred))
    # What needs nothing of its own step could start at once: it waits for the step before.
    begun = [
        work if work.after else replace(work, after_previous=(*work.after_previous, END))
        for work in works
    ]
    return [*begun, end]


def steady_step(
    works: Sequence[Work],
    tasks: Sequence[Task],
    lanes: Iterable[LaneSpec],
    contention: Contention,
) -> Timeline:
    """One step in the steady state, from the end of the one before to its own.

    Where steps differ for ever, the longer of two neighbours.
    """
    periodic = steady_state(repeatable(works, tasks), lanes, contention, steps=STEPS)
    ends_s = [next(s.end_s for s in spans if s.name == END) for spans in periodic.steps]
    last = max((STEPS - 1, STEPS - 2), key=lambda step: ends_s[step] - ends_s[step - 1])
    spans = _cut(periodic, last, ends_s[last - 1], ends_s[last])
    return Timeline("predicted", tuple(spans), peak_bytes={})


def _cut(periodic: Periodic, step: int, start_s: float, end_s: float) -> Iterator[Span]:
    """What happens from `start_s` to `end_s`, of whichever step; times count from `start_s`."""
    for number, spans in enumerate(periodic.steps):
        for span in spans:
            begin_s, finish_s = max(span.start_s, start_s), min(span.end_s, end_s)
            is_own = number == step
            if span.name != END and (begin_s < finish_s or (is_own and begin_s == finish_s)):
                yield Span(span.lane, span.name, begin_s - start_s, finish_s - start_s)
