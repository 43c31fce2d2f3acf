"""Work: a search ends where it has done what it may, at the same point whatever the clock says."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from cotrain_compile.cli.terminal import as_flags
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import WORK_LIMIT, Solution
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.work import Allowance, Meter, SolverWork
from tests.support.dataflows import mixed_precision_step
from tests.support.random_problems import least_bytes, with_budget
from tests.unit.placement.test_orders import eight
from tests.unit.placement.test_solve import problem_of

SEARCH = "cotrain_compile.placement.search"
PROBLEMS = {
    "states": problem_of(mixed_precision_step(3, params=500_000), 0.5),
    "micro-batches": eight(200),
}
DRAFT = 1.0
# Every layer made again, and every other, by each rule; and in how many orders a step is planned.
USUAL = 2 * len(RULES)
ORDERS = {"states": 1, "micro-batches": 4}


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still but where a test says otherwise."""
    clock = Clock()
    monkeypatch.setattr("cotrain_compile.placement.work.time", clock)
    return clock


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> list[Meter]:
    """The meters of searches in which a schedule takes `DRAFT`, and a program all it is given."""
    made = list[Meter]()
    begin = Meter.__init__

    def begun(meter: Meter, *arguments: Any) -> None:
        begin(meter, *arguments)
        made.append(meter)

    def stopped(program: Program, solver: str, *, work: Allowance, **_: object) -> Solution:
        work.meter.charge(work.left)
        return Solution(WORK_LIMIT, None, math.inf, math.inf, 0.0, 0.0)

    monkeypatch.setattr(Meter, "__init__", begun)
    monkeypatch.setattr(f"{SEARCH}.attempts.PER_OP_OF_DRAFT", 0.0)
    monkeypatch.setattr(f"{SEARCH}.programs.solve_program", stopped)
    monkeypatch.setattr(f"{SEARCH}.solve.certified_bound_s", lambda *_, **__: 0.0)

    def drafted(problem: Problem, *arguments: Any, **options: Any) -> Draft:
        made[0].charge(DRAFT)
        return draft(problem, *arguments, **options)

    monkeypatch.setattr(f"{SEARCH}.attempts.draft", drafted)
    return made


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limit", [1e-6, 8.0, 40.0])
def test_a_search_does_what_it_may_and_no_more(
    meters: list[Meter], name: str, overlap: bool, limit: float
) -> None:
    """But for what has begun, and what users write themselves, which every plan is held against.

    Where much is allowed, programs have it.
    """
    problem = PROBLEMS[name]
    plan = solve(problem, SolveSettings(work_limit=limit, overlap_steps=overlap))
    check(problem, plan)
    spent = meters[0].spent
    assert spent <= limit + (3 + ORDERS[name] * USUAL) * DRAFT
    assert limit < 20.0 or spent >= 0.5 * limit


def test_a_refusal_for_want_of_work_says_so_first_and_quotes_no_need(
    meters: list[Meter],
) -> None:
    """What is needed on the host with nothing made again is not what a longer search needs."""
    problem = PROBLEMS["states"]
    scarce = with_budget(problem, least_bytes(problem), 0)
    with pytest.raises(PlacementError, match=r"^the search ended at its work_limit \(8\)") as late:
        solve(scarce, SolveSettings(work_limit=8.0))
    said = str(late.value)
    assert "Raise work_limit;" in said
    assert "the step takes" not in said
    assert as_flags(said).count("--work-limit") == 2


def test_a_refusal_in_time_says_what_is_needed() -> None:
    problem = PROBLEMS["states"]
    scarce = with_budget(problem, least_bytes(problem), 0)
    with pytest.raises(PlacementError, match=r"the step takes .* on the host: raise host_memory"):
        solve(scarce, SolveSettings("greedy"))


@pytest.mark.parametrize(("share", "is_far"), [(0.5, True), (0.99, False)])
def test_a_plan_far_above_its_bound_for_want_of_work_names_the_way_on(
    meters: list[Meter], monkeypatch: pytest.MonkeyPatch, share: float, is_far: bool
) -> None:
    problem = PROBLEMS["states"]
    fastest_s = solve(problem, SolveSettings(work_limit=8.0)).predicted.makespan_s
    meters.clear()
    bound_s = share * fastest_s
    monkeypatch.setattr(f"{SEARCH}.solve.certified_bound_s", lambda *_, **__: bound_s)
    plan = solve(problem, SolveSettings(work_limit=8.0))
    far = [note for note in plan.notes if "a larger work_limit may find a faster one" in note]
    assert len(far) == is_far
    assert not is_far or "above the bound" in far[0]


@pytest.mark.parametrize("share", [1e-6, 0.99, 0.0], ids=["far", "near", "unbounded"])
def test_the_clock_guards_a_search_and_is_named(
    meters: list[Meter], clock: Clock, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Where the computer is so slow that the guard comes first, nothing more begins.

    However near the plan is to its bound: the next search may find another one.
    """
    problem = PROBLEMS["states"]

    def slowly(*arguments: Any, **options: Any) -> Draft:
        clock.now_s += 5.0
        return draft(*arguments, **options)

    monkeypatch.setattr(f"{SEARCH}.attempts.draft", slowly)
    bound_s = share * draft(problem, RULES["zero-offload"](problem.dataflow)).step_s
    monkeypatch.setattr(f"{SEARCH}.solve.certified_bound_s", lambda *_, **__: bound_s)
    plan = solve(problem, SolveSettings(work_limit=1e9, time_limit_s=8.0))
    check(problem, plan)
    assert clock.now_s - 1000.0 <= 8.0 + 3 * 5.0
    (told,) = [note for note in plan.notes if "ended at its time_limit (8 s)" in note]
    assert ("above the bound" in told) == (share > 0.0)


@pytest.mark.parametrize(
    "share", [*(pytest.param(s, marks=pytest.mark.long) for s in (0.35, 0.5)), 0.8]
)
def test_a_plan_is_the_same_however_time_passes(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """With a clock that jumps at random, up to what guards the search, nothing is different."""

    class Jumping(Clock):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.random = random.Random(seed)

        def monotonic(self) -> float:
            self.now_s += self.random.expovariate(100.0)
            return self.now_s

    problem = PROBLEMS["states"]
    whole = problem.budgets[Tier.DEVICE] / 0.5
    asked = problem.with_budget(Tier.DEVICE, max(least_bytes(problem), int(share * whole)))
    plans = []
    for seed in range(3):
        monkeypatch.setattr("cotrain_compile.placement.work.time", Jumping(seed))
        plans.append(solve(asked, SolveSettings(work_limit=2.0, time_limit_s=1e6)))
    first, *others = [(plan.placement, plan.tasks, plan.predicted) for plan in plans]
    assert others == [first] * 2


def test_a_part_begins_now_and_has_its_share_of_what_is_left() -> None:
    meter = Meter()
    whole = Allowance(meter, 10.0)
    meter.charge(4.0)
    part = whole.part(0.5)
    assert (whole.left, part.left) == pytest.approx((6.0, 3.0))
    meter.charge(7.0)
    assert (whole.left, part.left) == (0.0, 0.0)


def test_nothing_is_left_when_time_is_up(clock: Clock) -> None:
    work = Allowance(Meter(5.0), 10.0)
    assert work.left == 10.0
    assert not work.meter.guard_hit
    clock.now_s += 6.0
    assert work.left == 0.0
    assert work.meter.guard_hit
    assert work.meter.elapsed_s == 6.0


@pytest.mark.parametrize("units", [0.0, 0.01, 1.0, 50.0])
def test_what_a_solver_may_do_costs_no_more_than_it_is_worth(units: float) -> None:
    sizes = SolverWork(entries=60_000)
    may = sizes.limits(units)
    for name, most in may.items():
        assert sizes.units({**dict.fromkeys(may, 0), name: most}) <= units + 1e-9
