"""Sweep: what a step would take under many budgets, on many machines, at many sizes.

In: a Dataflow and the cases to try. Out: a `Point` for each, from a plan solved for it. Cases know
nothing of one another, so they can be solved in parallel; `carry` has what they say of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import Dataflow, Job
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Machine, Rates, Tier, default_budget
from cotrain_compile.placement.explain.sensitivity import limits
from cotrain_compile.placement.problem import Problem, formulate
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
