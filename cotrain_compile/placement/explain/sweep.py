"""Sweep: what a step would take under many budgets, on many machines, at many sizes.

In: a Dataflow and the cases to try. Out: a `Point` for each, from a plan solved for it. Cases know
nothing of one another, so they can be solved in parallel; `carry_over` has what they say of each
other.

Carry: what the cases of a sweep say about one another.

A plan is one for any machine that is nowhere slower and has no less memory: a faster machine, or
more memory, never has a slower plan. In: what came of each case. Out: the points of all.

`is_nowhere_slower` compares two machines rate by rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import Dataflow, Job
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import (
    HostUpdate,
    Link,
    Machine,
    Network,
    Processor,
    Rates,
    Tier,
    default_budget,
)
from cotrain_compile.placement.explain.sensitivity import limits
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import Draft, finished
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes

FORMAT_VERSION = 2

# The regime of a plan in which nothing moves; otherwise it is the lane the step hangs on most.
FITS = "fits"


@dataclass(frozen=True)
class Case:
    """One thing to try: budgets in bytes by tier; `sizes` of the step's symbols, by name."""

    machine: Machine
    budgets: Mapping[Tier, int]
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """What came of a case.

    `step_s`, `lower_bound_s` (the certified bound, 0 where there is none), `peak_bytes` on the
    device and `traffic_bytes` both ways are those of its plan; None and 0 where nothing fits. Then
    `shortfall_bytes` are missing on `shortfall_tier`, and `refusal` says what would help. `regime`
    is `FITS`, the lane the step hangs on, or "". With `unknown_ops` the bound is not certified.
    Where the solver `stopped_early`, at its limit, there may be a faster plan. `rates` say
    where those of the machine come from.
    """

    machine: str
    device_budget_bytes: int
    host_budget_bytes: int
    sizes: Mapping[str, int]
    step_s: float | None
    lower_bound_s: float = 0.0
    policy: str = ""
    regime: str = ""
    peak_bytes: int = 0
    traffic_bytes: int = 0
    shortfall_bytes: int = 0
    shortfall_tier: Tier = Tier.DEVICE
    refusal: str = ""
    unknown_ops: int = 0
    stopped_early: bool = False
    rates: Rates = Rates.GIVEN


@dataclass(frozen=True)
class Sweep:
    """All points of the step with this fingerprint, which is of this job."""

    fingerprint: str
    points: tuple[Point, ...]
    job: Job = field(default_factory=Job)


def try_case(dataflow: Dataflow, case: Case, settings: SolveSettings) -> tuple[Point, Plan | None]:
    """Solve one case. Raises what solving raises, but for a placement that does not fit."""
    problem, empty = problem_of(dataflow, case), _empty(case)
    try:
        plan = solve(problem, settings)
    except PlacementError as refusal:
        missing = replace(
            empty,
            shortfall_bytes=refusal.shortfall_bytes,
            shortfall_tier=refusal.tier,
            refusal=str(refusal),
        )
        return missing, None
    return point_of(case, problem, plan), plan


def problem_of(dataflow: Dataflow, case: Case) -> Problem:
    """What is solved for a case."""
    sized = dataflow
    if case.sizes:
        from cotrain_compile.analysis.symbolic import at  # with sympy, which is long to load

        sized = at(dataflow, {**dataflow.symbols, **case.sizes})
    return formulate(sized, case.machine, case.budgets)


def point_of(case: Case, problem: Problem, plan: Plan) -> Point:
    """What `plan` says of its case."""
    return replace(
        _empty(case),
        step_s=plan.predicted.makespan_s,
        lower_bound_s=plan.report.lower_bound_s if plan.report else 0.0,
        policy=plan.placement.policy,
        regime=str(limits(problem, plan).first) if plan.tasks else FITS,
        peak_bytes=plan.predicted.peak_bytes[Tier.DEVICE],
        traffic_bytes=plan.bytes_moved("offload") + plan.bytes_moved("prefetch"),
        unknown_ops=len(problem.unknown_ops),
        stopped_early=plan.report is not None and "limit" in plan.report.status,
    )


def _empty(case: Case) -> Point:
    return Point(
        machine=case.machine.name,
        device_budget_bytes=case.budgets[Tier.DEVICE],
        host_budget_bytes=case.budgets[Tier.HOST],
        sizes=dict(case.sizes),
        step_s=None,
        rates=case.machine.rates,
    )


def refuse_if_nothing_fits(points: Sequence[Point]) -> None:
    """Raise `PlacementError` where no case has a plan; it says what the nearest one lacks."""
    if points and all(point.step_s is None for point in points):
        least = min(points, key=lambda point: point.shortfall_bytes)
        raise PlacementError(
            f"nothing fits in any of these budgets; nearest is {least.machine} with "
            f"{format_bytes(least.device_budget_bytes)} on the device: {least.refusal}",
            shortfall_bytes=least.shortfall_bytes,
            tier=least.shortfall_tier,
        )


def device_budgets(
    dataflow: Dataflow, machine: Machine, host_budget_bytes: int, count: int
) -> tuple[int, ...]:
    """`count` device budgets worth trying: from the least that can do to what the step can use.

    The largest is what the step takes with everything on the device, or the default budget of
    `machine`. Raises `PlacementError` where even all of that is too little.
    """
    most = min(liveness(dataflow).peak_bytes, default_budget.of_machine(machine))
    budgets = {Tier.DEVICE: 1, Tier.HOST: host_budget_bytes}
    least = 1
    try:
        solve(formulate(dataflow, machine, budgets), SolveSettings("greedy"))
    except PlacementError as refusal:
        least += refusal.shortfall_bytes
        if least > most:
            raise
    step = (most - least) / max(1, count - 1)
    return tuple(sorted({least + round(number * step) for number in range(count - 1)} | {most}))


def is_nowhere_slower(one: Machine, other: Machine) -> bool:
    """Whether nothing that `other` does takes `one` longer; unknown of several devices, so False.

    What memory they have is not compared.
    """
    if not (one.has_one_device and other.has_one_device):
        return False
    processors = ((p, other.processors[name]) for name, p in one.processors.items())
    links = ((link, other.links[name]) for name, link in one.links.items())
    return (
        all(_works_no_slower(*pair) for pair in processors)
        and all(_carries_no_slower(*pair) for pair in links)
        and one.duplex >= other.duplex
        and _exchanges_no_slower(one.network, other.network)
    )


def _works_no_slower(one: Processor, other: Processor) -> bool:
    alike = (one.fuses_updates, one.runs_ahead) == (other.fuses_updates, other.runs_ahead)
    rates = one.flops_per_s.keys() | other.flops_per_s.keys()
    return (
        alike
        and one.bytes_per_s >= other.bytes_per_s
        and all(_rate(one.flops_per_s, r) >= _rate(other.flops_per_s, r) for r in rates)
        and one.launch_s <= other.launch_s
        and one.issue_s <= other.issue_s
        and (one.factors, one.starts_s) == (other.factors, other.starts_s)
        and _updates_no_slower(one.update, other.update)
    )


def _rate(flops_per_s: Mapping[str, float], dtype: str) -> float:
    return flops_per_s.get(dtype, min(flops_per_s.values()))


def _updates_no_slower(one: HostUpdate | None, other: HostUpdate | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.bytes_per_s >= other.bytes_per_s
        and one.workers == other.workers
        and one.slowdown_while_copying <= other.slowdown_while_copying
        and one.seconds_per_element <= other.seconds_per_element
        and one.seconds_per_fresh_byte <= other.seconds_per_fresh_byte
    )


def _carries_no_slower(one: Link, other: Link) -> bool:
    return one.bytes_per_s >= other.bytes_per_s and one.latency_s <= other.latency_s


def _exchanges_no_slower(one: Network | None, other: Network | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.bytes_per_s >= other.bytes_per_s
        and one.latency_s <= other.latency_s
        and one.scatter <= other.scatter
    )


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


def carry_over(points: Iterable[Point]) -> tuple[Point, ...]:
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
