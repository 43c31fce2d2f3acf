"""Steady: a step repeated until each is like the one before, and what one of these looks like.

In: the works of one step and the tasks among them that are carried into the next step. Out: works
that can be repeated, or the Timeline of one step in the steady state. Its makespan is the period:
what training takes for each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cotrain_compile.machine import Contention
from cotrain_compile.placement.simulate.engine import LaneSpec, Periodic, Work, steady_state
from cotrain_compile.plan import Lane, Span, Task, Timeline

END = "end of step"
# What is carried is waited for in the next step, so that the first few steps tell all.
STEPS = 6


def repeatable(works: Sequence[Work], tasks: Sequence[Task]) -> list[Work]:
    """`works` of which each step begins when the one before is complete but for what is carried."""
    end = Work(END, Lane.DEVICE, 0.0, after=tuple(t.name for t in tasks if not t.carried))
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
