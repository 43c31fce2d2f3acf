"""Deadline: a search ends in time, whatever its parts take; on a clock of the test's own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cotrain_compile.cli.flags import as_flags
from cotrain_compile.errors import PlacementError
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import Solution
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.placement.search.deadline import Deadline
from cotrain_compile.placement.search.solve import SolveSettings, solve
from tests.support.dataflows import mixed_precision_step
from tests.support.random_problems import least_bytes, with_budget
from tests.unit.placement.test_orders import eight
from tests.unit.placement.test_solve import problem_of

DRAFT_S = 1.0
SEARCH = "cotrain_compile.placement.search"
PROBLEMS = {
    "states": problem_of(mixed_precision_step(3, params=500_000), 0.5),
    "micro-batches": eight(200),
}


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A schedule takes `DRAFT_S`, a program all the time it is given, and then has no solution."""
    clock = Clock()

    def drafted(problem: Problem, *arguments: Any, **options: Any) -> Draft:
        clock.now_s += DRAFT_S
        return draft(problem, *arguments, **options)

    def stopped(program: Program, solver: str, *, time_limit_s: float, **_: object) -> Solution:
        clock.now_s += time_limit_s
        return Solution("time limit reached", None, math.inf, math.inf, 0.0, time_limit_s)

    for module in ("deadline", "attempts"):
        monkeypatch.setattr(f"{SEARCH}.{module}.time", clock)
    monkeypatch.setattr(f"{SEARCH}.attempts.draft", drafted)
    monkeypatch.setattr(f"{SEARCH}.programs.solve_program", stopped)
    monkeypatch.setattr(f"{SEARCH}.solve.certified_bound_s", lambda *_, **__: 0.0)
    return clock


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limit_s", [1e-6, 8.0, 40.0])
def test_a_plan_is_there_in_time(clock: Clock, name: str, overlap: bool, limit_s: float) -> None:
    """By the deadline, but for what has begun; and where there is time, programs have it."""
    problem = PROBLEMS[name]
    began_s = clock.now_s
    plan = solve(problem, SolveSettings(time_limit_s=limit_s, overlap_steps=overlap))
    check(problem, plan)
    assert clock.now_s - began_s <= limit_s + 3 * DRAFT_S
    assert plan.report is not None
    assert limit_s < 20.0 or clock.now_s - began_s >= 0.5 * limit_s


def test_a_refusal_for_want_of_time_says_so_first_and_quotes_no_need(clock: Clock) -> None:
    """What is needed on the host with nothing made again is not what a longer search needs."""
    problem = PROBLEMS["states"]
    scarce = with_budget(problem, least_bytes(problem), 0)
    with pytest.raises(
        PlacementError, match=r"^the search ran out of its time \(time_limit 8 s\)"
    ) as late:
        solve(scarce, SolveSettings(time_limit_s=8.0))
    said = str(late.value)
    assert "Raise time_limit;" in said
    assert "the step takes" not in said
    assert as_flags(said).count("--time-limit") == 2


def test_a_refusal_in_time_says_what_is_needed() -> None:
    problem = PROBLEMS["states"]
    scarce = with_budget(problem, least_bytes(problem), 0)
    with pytest.raises(PlacementError, match=r"the step takes .* on the host: raise host_memory"):
        solve(scarce, SolveSettings("greedy"))


@pytest.mark.parametrize(("share", "is_far"), [(0.5, True), (0.99, False)])
def test_a_plan_far_above_its_bound_for_want_of_time_names_the_way_on(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, share: float, is_far: bool
) -> None:
    problem = PROBLEMS["states"]
    fastest_s = solve(problem, SolveSettings(time_limit_s=8.0)).predicted.makespan_s
    bound_s = share * fastest_s
    monkeypatch.setattr(f"{SEARCH}.solve.certified_bound_s", lambda *_, **__: bound_s)
    plan = solve(problem, SolveSettings(time_limit_s=8.0))
    far = [note for note in plan.notes if "a longer time_limit may find a faster one" in note]
    assert len(far) == is_far
    assert not is_far or "above the bound" in far[0]


def test_a_part_begins_now_and_has_its_share_of_what_is_left(clock: Clock) -> None:
    whole = Deadline(10.0)
    clock.now_s += 4.0
    part = whole.part(0.5)
    assert (whole.elapsed_s, whole.left_s) == pytest.approx((4.0, 6.0))
    assert (part.elapsed_s, part.left_s) == pytest.approx((0.0, 3.0))
    clock.now_s += 7.0
    assert (whole.left_s, part.left_s) == (0.0, 0.0)
