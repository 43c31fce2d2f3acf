"""The course of a search: what it found over its work, what ended it, and how that is told."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from cotrain_compile.machine import Tier
from cotrain_compile.placement.search import solve as searches
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan, SolveReport
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.support.units import format_seconds
from cotrain_compile.viz.text.summary import search
from tests.support.dataflows import mixed_precision_step
from tests.unit.placement.test_solve import problem_of

PROBLEM = problem_of(mixed_precision_step(3, params=500_000), 0.5)


def reported(plan: Plan) -> SolveReport:
    assert plan.report is not None
    return plan.report


@pytest.mark.parametrize("work_limit", [1e-6, 12.0])
def test_each_is_faster_than_the_one_before_and_found_later(work_limit: float) -> None:
    report = reported(solve(PROBLEM, SolveSettings(work_limit=work_limit)))
    found = report.course
    assert found
    for one, next_one in pairwise(found):
        assert next_one.seconds < one.seconds
        assert next_one.work >= one.work
    assert found[-1].work <= report.work
    assert report.bound_work > 0.0
    assert {one.name for one in found} <= {*report.simulated_s}


def test_what_ended_a_search_is_its_limit_the_bound_or_that_all_was_tried() -> None:
    assert reported(solve(PROBLEM, SolveSettings(work_limit=1e-6))).ended == (
        "its work_limit (1e-06) was spent"
    )
    slack = reported(solve(PROBLEM, SolveSettings(gap=100.0)))
    assert slack.ended == "the plan is within 10000.0% of the bound"
    rule = reported(solve(PROBLEM, SolveSettings("greedy")))
    assert rule.ended == "all was tried"


def test_a_search_is_told_in_one_line() -> None:
    plan = solve(PROBLEM)
    report = reported(plan)
    told = search(report)
    assert "\n" not in told
    assert all(f"by {plan_words(one.name)} after {one.work:.1f}" in told for one in report.course)
    assert told.endswith(f"it ended after {report.work:.1f}: {report.ended}")
    assert "bound" not in told.removesuffix(report.ended)
    assert f"certified bound {format_seconds(report.lower_bound_s)} after" in search(
        report, with_bound=True
    )
    assert plan.budgets[Tier.DEVICE] < PROBLEM.machine.device.capacity_bytes


def test_a_plan_far_from_the_bound_is_scheduled_in_other_ways_behind_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they take the work with which a program finds a better one."""
    begun: list[str] = []

    def told(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*given: Any) -> Any:
            begun.append(name)
            return part(*given)

        return tell

    monkeypatch.setattr(searches, "FAR", 0.0)  # as if all were far
    for name in ("climb_by_program", "fetch_late"):
        monkeypatch.setattr(searches, name, told(name, getattr(searches, name)))
    solve(PROBLEM)
    assert begun[:2] == ["climb_by_program", "fetch_late"]
