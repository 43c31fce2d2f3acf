"""Deadline: a search ends in time, whatever its parts take; on a clock of the test's own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import Solution
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.placement.search.deadline import Deadline
from cotrain_compile.placement.search.solve import SolveSettings, solve
from tests.support.dataflows import mixed_precision_step
from tests.unit.placement.test_orders import eight
from tests.unit.placement.test_solve import problem_of

DRAFT_S = 1.0
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
    clock, search = Clock(), "cotrain_compile.placement.search"

    def drafted(problem: Problem, *arguments: Any, **options: Any) -> Draft:
        clock.now_s += DRAFT_S
        return draft(problem, *arguments, **options)

    def stopped(program: Program, solver: str, *, time_limit_s: float, **_: object) -> Solution:
        clock.now_s += time_limit_s
        return Solution("time limit reached", None, math.inf, math.inf, 0.0, time_limit_s)

    for module in ("deadline", "attempts"):
        monkeypatch.setattr(f"{search}.{module}.time", clock)
    monkeypatch.setattr(f"{search}.attempts.draft", drafted)
    monkeypatch.setattr(f"{search}.programs.solve_program", stopped)
    monkeypatch.setattr(f"{search}.solve.certified_bound_s", lambda *_, **__: 0.0)
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


def test_a_part_begins_now_and_has_its_share_of_what_is_left(clock: Clock) -> None:
    whole = Deadline(10.0)
    clock.now_s += 4.0
    part = whole.part(0.5)
    assert (whole.elapsed_s, whole.left_s) == pytest.approx((4.0, 6.0))
    assert (part.elapsed_s, part.left_s) == pytest.approx((0.0, 3.0))
    clock.now_s += 7.0
    assert (whole.left_s, part.left_s) == (0.0, 0.0)
