"""Carry: what the cases of a sweep say about one another.

A plan is one for any machine that is nowhere slower and has no less memory: a faster machine, or
more memory, never has a slower plan. In: what came of each case. Out: the points of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine.speed import is_nowhere_slower
from cotrain_compile.placement.explain.sweep import FITS, Case, Point, point_of, problem_of
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import Draft, finished
from cotrain_compile.plan import Plan


@dataclass(frozen=True)
class Tried:
    """A case and what came of it; no plan where nothing fits."""

    case: Case
    point: Point
    plan: Plan | None


def with_plans_of_slower_machines(dataflow: Dataflow, tried: Sequence[Tried]) -> Iterator[Point]:
    """The points of `tried`, in their order: each its own, or of a slower machine's plan if faster.

    Such a plan is simulated at the rates of the machine that takes it; its memory is the same.
    """
    for own in tried:
        point = own.point
        for other in tried if point.regime != FITS else ():
            if other.plan is None or not (_serves(other, own) and _faster(other.point, point)):
                continue
            problem = problem_of(dataflow, own.case)
            found = point_of(own.case, problem, _planned_again(problem, other.plan))
            if _faster(found, point):
                point = replace(
                    found, lower_bound_s=point.lower_bound_s, stopped_early=point.stopped_early
                )
        yield point


def _planned_again(problem: Problem, plan: Plan) -> Plan:
    """The same tasks, at the rates of `problem` and within its budgets."""
    return finished(problem, Draft(plan.placement, plan.tasks, plan.moved, 0.0))


def _serves(one: Tried, other: Tried) -> bool:
    """Whether a plan for `one` is one for the machine of `other`, which is another."""
    a, b = one.case, other.case
    return (
        a.machine != b.machine
        and a.sizes == b.sizes
        and all(n <= b.budgets.get(tier, 0) for tier, n in a.budgets.items())
        and is_nowhere_slower(b.machine, a.machine)
    )


def carried(points: Iterable[Point]) -> tuple[Point, ...]:
    """`points` with what they say about one another, on the same machine at the same sizes.

    A plan for a smaller budget fits a larger one: where it is faster, its time is shown. A bound
    for a larger budget holds for a smaller one. Where everything fits nothing moves, whatever else
    would be faster.
    """
    alike: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        key = (point.machine, *point.sizes.items(), point.host_budget_bytes)
        alike.setdefault(key, []).append(point)
    result: list[Point] = []
    for own in alike.values():
        own.sort(key=lambda point: point.device_budget_bytes)
        result += _with_bounds_of_larger(_with_plans_of_smaller(own))
    return tuple(result)


def _with_plans_of_smaller(points: Sequence[Point]) -> list[Point]:
    result: list[Point] = []
    for point in points:
        if result and point.regime != FITS and _faster(result[-1], point):
            point = replace(
                result[-1],
                device_budget_bytes=point.device_budget_bytes,
                lower_bound_s=point.lower_bound_s,
                stopped_early=point.stopped_early,
            )
        result.append(point)
    return result


def _with_bounds_of_larger(points: Sequence[Point]) -> list[Point]:
    bounds = list(accumulate((p.lower_bound_s for p in reversed(points)), max))
    return [
        replace(point, lower_bound_s=bound if point.step_s is not None else 0.0)
        for point, bound in zip(points, reversed(bounds), strict=True)
    ]


def _faster(one: Point, other: Point) -> bool:
    return one.step_s is not None and (other.step_s is None or one.step_s < other.step_s)
