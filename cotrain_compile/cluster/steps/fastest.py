"""Fastest: of many choices the one whose step takes least, few of which have to be simulated.

No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeVar

from cotrain_compile.cluster.steps.stage_step import StageStep


class Candidate(Protocol):
    """A choice with its step, and seconds that the step takes at least."""

    @property
    def least_s(self) -> float: ...

    @property
    def step(self) -> StageStep: ...


P = TypeVar("P", bound=Candidate)
B = TypeVar("B", bound="BoundedTwice")
Made = TypeVar("Made", bound=Candidate, covariant=True)


class BoundedTwice(Candidate, Protocol):
    """A choice with a second bound, no lower than the first, which takes more to find."""

    @property
    def closer_s(self) -> float: ...


class PlanOption(Protocol[Made]):
    """Some choices with seconds that none of them passes under, before any of them is made."""

    @property
    def least_s(self) -> float: ...

    def plans(self) -> Iterable[Made]: ...


def fastest(plans: Iterable[P]) -> P | None:
    """The first of those that take least; what is ruled out by what it takes at least is not
    simulated, and no step is kept but the best one."""
    queue = deque(sorted(plans, key=lambda plan: plan.least_s))
    best: P | None = None
    while queue:
        plan = queue.popleft()
        if best and plan.least_s >= best.step.seconds:
            break
        if best is None or plan.step.seconds < best.step.seconds:
            best = plan
    return best


def fastest_option(options: Iterable[PlanOption[B]]) -> tuple[int, B] | None:
    """The same of all plans of all options, behind the number of its option: the one with the least
    bound is next, an option to make plans, a plan to get its closer bound, then to be simulated.

    Of those that take as long, but for rounding, the first.
    """
    queue: list[tuple[float, int, int, bool, Any]] = [
        (option.least_s, number, _OPTION, False, option) for number, option in enumerate(options)
    ]
    heapify(queue)
    found: tuple[float, int, int] | None = None
    best: tuple[int, B] | None = None
    while queue and not (found and queue[0][0] > found[0]):
        least_s, number, i, is_closer, made = heappop(queue)
        if i == _OPTION:
            for place, plan in enumerate(made.plans()):
                heappush(queue, (max(least_s, plan.least_s), number, place, False, plan))
            continue
        if not is_closer:
            heappush(queue, (max(least_s, made.closer_s), number, i, True, made))
            continue
        key = _but_rounding(made.step.seconds), number, i
        if found is None or key < found:
            found, best = key, (number, made)
    return best


_OPTION = -1  # in place of the number of a plan


def _but_rounding(seconds: float) -> float:
    """The same for sums of the same seconds in another order."""
    return float(f"{seconds:.9g}")
