"""Refusals: what is missing on which tier, how much is enough, and the way on that works."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import assume, given

from cotrain_compile.dataflow import Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.infeasible import floor_bytes
from cotrain_compile.placement.search.solve import CERTIFIED, SolveSettings, solve
from cotrain_compile.support.units import format_bytes
from tests.support.examples import examples
from tests.support.random_problems import least_bytes, problems, resident_bytes, with_budget
from tests.unit.placement.test_solve import STEPS, problem_of


@pytest.mark.parametrize(
    ("policy", "share", "says"),
    [
        ("resident", 0.5, r"short; use policy='auto', .* and needs at least .* on the device"),
        ("fraction:auto", 0.0, r"short; use policy='auto'"),
        ("zero-offload", -0.2, r"short; raise memory_budget to at least .* and use policy='auto'"),
    ],
)
def test_a_rule_that_does_not_fit_points_to_auto_with_what_that_needs(
    policy: str, share: float, says: str
) -> None:
    problem = problem_of(STEPS["chain"], share)
    least = least_bytes(problem)
    with pytest.raises(PlacementError, match=says) as refusal:
        solve(problem, SolveSettings(policy))
    assert format_bytes(least) in str(refusal.value)
    # Following it works.
    enough = with_budget(problem, max(least, problem.budgets[Tier.DEVICE]))
    check(enough, solve(enough, SolveSettings(work_limit=1)))


def test_a_rule_short_of_host_memory_points_to_auto_which_needs_less() -> None:
    """Just not everything fits the device, so a few bytes on the host do."""
    problem = problem_of(STEPS["chain"], 0.99)
    host_bytes = problem.dataflow.total_bytes(Role.OPTIMIZER_STATE) // 2
    scarce = with_budget(problem, problem.budgets[Tier.DEVICE], host_bytes)
    with pytest.raises(PlacementError, match=r"raise host_memory_budget, or use policy='auto'"):
        solve(scarce, SolveSettings("streamed"))
    check(scarce, solve(scarce, SolveSettings(work_limit=1)))


def test_a_refusal_says_what_is_needed_where_and_what_to_do() -> None:
    problem = problem_of(STEPS["tied"])
    least = least_bytes(problem)
    with pytest.raises(PlacementError) as refusal:
        solve(with_budget(problem, least - 4096))
    message = str(refusal.value)
    for part in ("the step needs at least", "on the device (at test.", "(4,096 bytes) short"):
        assert part in message
    assert "raise memory_budget" in message


@given(problems())
@examples(8)
def test_no_plan_gets_by_with_less_than_one_op_touches(problem: Problem) -> None:
    """On the least budget that is told, where a plan is found in it, and on more."""
    least, floor = least_bytes(problem), floor_bytes(problem.dataflow)
    assert 0 < floor <= least
    for budget in (least, least + (resident_bytes(problem) - least) // 8):
        with suppress(PlanError):
            plan = solve(with_budget(problem, budget), SolveSettings("greedy"))
            assert floor <= replay(problem.dataflow, plan)[Tier.DEVICE].nbytes


@pytest.mark.parametrize("policy", CERTIFIED)
def test_less_than_one_op_touches_is_refused_before_a_plan_is_looked_for(policy: str) -> None:
    problem = problem_of(STEPS["tied"])
    told: list[str] = []
    little = with_budget(problem, floor_bytes(problem.dataflow) - 1)
    with pytest.raises(PlacementError, match="the step needs at least"):
        solve(little, SolveSettings(policy), progress=told.append)
    of_levels = ["looking for what can be recomputed"] if policy == "auto" else []
    assert told == ["looking for the least that does", *of_levels]


@given(problems(most=2))
@examples(6)
def test_a_refusal_for_want_of_host_memory_says_how_much_is_enough(problem: Problem) -> None:
    """At the least device budget nothing fits without the host, unless nothing at all can move."""
    device_bytes = least_bytes(problem)
    assume(device_bytes < resident_bytes(problem) // 2)
    with pytest.raises(PlacementError, match="host_memory_budget") as refusal:
        solve(with_budget(problem, device_bytes, 0), SolveSettings("greedy"))
    assert refusal.value.tier is Tier.HOST
    enough = with_budget(problem, device_bytes, refusal.value.shortfall_bytes)
    plan = solve(enough, SolveSettings("greedy"))
    check(enough, plan)
    assert plan.predicted.peak_bytes[Tier.HOST] <= enough.budgets[Tier.HOST]
