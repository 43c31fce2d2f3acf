"""Works: a placed step as what the simulator runs: device ops, tasks and exchanges, with seconds.

What is issued holds up the device where Python takes longer to start it than the ops before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, assert_never

from cotrain_compile.dataflow import Op
from cotrain_compile.machine import Machine
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.placement.simulate.engine import LaneSpec, Work
from cotrain_compile.placement.simulate.from_disk import FromDisk
from cotrain_compile.plan import HostRegion, Lane, Task, Transfer, carried_out
from cotrain_compile.plan.timeline import exchange_of

# What starting a task takes for each further member of a bundle, of a task by itself: the mean of
# copies down, copies up and updates on the emulated device (`python -m bench.runtime.issue_cost`).
MEMBER = 0.31


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
