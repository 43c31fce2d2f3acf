"""Predict: what a placed step with its tasks takes, as a Timeline from the simulator.

In the steady state a step is repeated until each is like the one before, with the tasks that are
carried into the next one. Its makespan is the period: what training takes for each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cotrain_compile.machine import Contention, Tier
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.residency import DeviceProgram
from cotrain_compile.placement.simulate.engine import (
    LaneSpec,
    Periodic,
    Work,
    makespan_s,
    simulate,
    steady_state,
)
from cotrain_compile.placement.simulate.works import joined_works_of, lanes_of, works_of
from cotrain_compile.plan import Lane, Task
from cotrain_compile.plan.timeline import Span, Timeline

END = "end of step"
# What is deferred is waited for in the next step, so that the first few steps tell all.
STEPS = 6


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
