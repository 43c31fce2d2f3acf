"""Helps: what would make a planned step faster, each with the seconds that it would take then.

In: a Problem, a plan of it and, where somebody has made one, the points of a sweep. Out: a `Help`
for each change that gains. Rates are doubled in a simulation of the same plan, so that another plan
may gain more; what memory buys is what plans for more of it take, as the sweep has found them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.explain.sensitivity import faster_s
from cotrain_compile.placement.explain.sweep import Point
from cotrain_compile.placement.placed import place
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.simulate.predict import step_s
from cotrain_compile.plan import Lane, Plan
from cotrain_compile.support.units import format_bytes, format_seconds

# What gains less of the step is not worth telling.
GAINS = 0.02
# How many times as fast a part of the machine is made.
TIMES = 2.0
_PARTS: Mapping[str, tuple[Lane, ...]] = {
    "a link to the host twice as fast": (Lane.D2H, Lane.H2D),
    "a device twice as fast": (Lane.DEVICE,),
    "updates on the host twice as fast": (Lane.HOST,),
    "a network twice as fast": (Lane.NETWORK,),
    "a disk twice as fast": (Lane.DISK_READ, Lane.DISK_WRITE),
}
# A host that is better in all: a copy may wait for an update, and an update for a copy.
_HOST = "link and updates on the host both twice as fast"
_UNBOUNDED = dict.fromkeys(MEMORIES, 1 << 62)
# A bound this far below the plan leaves something to look for.
_FAR = 0.05
_LONGER = 4
_GIB = 1 << 30


@dataclass(frozen=True)
class Help:
    """A change, what the step takes with it (None where nobody has computed it), and a remark."""

    change: str
    step_s: float | None
    remark: str


def helps(problem: Problem, plan: Plan, points: Sequence[Point] = ()) -> tuple[Help, ...]:
    """What would help `plan`, made for `problem`: what gains most first, then what is not known.

    `points` are those of a sweep over the same step; those of other machines are left out.
    """
    found = [*_more_memory(plan, points), *_all_on_the_device(problem, plan)]
    found += _twice_as_fast(problem, plan)
    known = sorted((one for one in found if one.step_s is not None), key=_seconds)
    return (*known, *_longer_search(plan), *([] if points else _unswept(plan)))


def _seconds(one: Help) -> float:
    return math.inf if one.step_s is None else one.step_s


def _gains(plan: Plan, step_s: float) -> bool:
    return step_s < (1 - GAINS) * plan.predicted.makespan_s


def _more_memory(plan: Plan, points: Sequence[Point]) -> Iterator[Help]:
    """The next budget of the sweep that gains, and the one that gains most."""
    has, now_s = plan.budgets[Tier.DEVICE], plan.predicted.makespan_s
    better = [
        (point.device_budget_bytes, point.step_s)
        for point in points
        if point.machine == plan.machine
        and point.host_budget_bytes == plan.budgets[Tier.HOST]
        and point.device_budget_bytes > has
        and point.step_s is not None
        and _gains(plan, point.step_s)
    ]
    if not better:
        return
    ends = (min(better), min(better, key=lambda each: (each[1], each[0])))
    for nbytes, taken_s in dict.fromkeys(ends):
        each_s = (now_s - taken_s) / ((nbytes - has) / _GIB)
        yield Help(
            f"{format_bytes(nbytes - has)} more device memory ({format_bytes(nbytes)})",
            taken_s,
            f"{format_seconds(each_s)} less for each GiB",
        )


def _unswept(plan: Plan) -> Iterator[Help]:
    """Where the device is full and nobody has asked what more of it would bring."""
    if plan.tasks:
        told = "cotrain-compile sweep and then show --sweep say what each GiB buys"
        yield Help("more device memory", None, told)


def _all_on_the_device(problem: Problem, plan: Plan) -> Iterator[Help]:
    """A device on which everything fits."""
    if not plan.tasks:
        return
    roomy = replace(problem, budgets=_UNBOUNDED)
    placed = place(roomy, resident(roomy.dataflow), (), ())
    taken_s, nbytes = step_s(placed), max(placed.device_bytes, default=0)
    if _gains(plan, taken_s):
        told = f"everything on the device ({format_bytes(nbytes)})"
        yield Help(told, taken_s, "nothing moves, nothing is recomputed")


def _twice_as_fast(problem: Problem, plan: Plan) -> Iterator[Help]:
    lanes = problem.machine.lanes
    parts = {words: [lane for lane in own if lane in lanes] for words, own in _PARTS.items()}
    sped = faster_s(problem, plan, [own for own in parts.values() if own], TIMES)
    told = dict(zip((words for words, own in parts.items() if own), sped, strict=True))
    both = [lane for lane in (Lane.D2H, Lane.H2D, Lane.HOST) if lane in lanes]
    (both_s,) = faster_s(problem, plan, [both], TIMES)
    alone_s = min(
        (taken_s for words, taken_s in told.items() if set(parts[words]) <= set(both)),
        default=plan.predicted.makespan_s,
    )
    if both_s < (1 - GAINS) * alone_s:
        told[_HOST] = both_s
    for words, taken_s in told.items():
        if _gains(plan, taken_s):
            yield Help(words, taken_s, "by the same plan")


def _longer_search(plan: Plan) -> Iterator[Help]:
    """Where the search ended at its limit, far above what no plan is below."""
    report = plan.report
    if report is None or not report.lower_bound_s or report.gap <= _FAR:
        return
    limits = [name for name in ("time_limit", "work_limit") if name in report.ended]
    if not limits and "limit" not in report.status:
        return
    yield Help(
        f"a search {_LONGER} times as long ({(limits or ['work_limit'])[0]})",
        None,
        f"may find a faster plan; none takes less than {format_seconds(report.lower_bound_s)}",
    )
