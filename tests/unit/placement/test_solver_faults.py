"""A solver that is absent, fails or has no time: simpler ways give the plan, said in one line."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp import solvers
from cotrain_compile.placement.milp.highs_process import (
    SolverAnswer,
    end_waiting,
    solve_elsewhere,
)
from cotrain_compile.placement.milp.linear import LinearProgram, summed
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import Solution, solve_program
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.work import UNLIMITED, Allowance, Meter
from cotrain_compile.plan import Plan
from cotrain_compile.support.plan_words import plan_words
from tests.support.dataflows import mixed_precision_step
from tests.unit.placement.test_solve import problem_of

PROBLEM = problem_of(mixed_precision_step(3, params=500_000), 0.5)
SETTINGS = SolveSettings("auto", work_limit=10.0)


def sound(plan: Plan) -> Plan:
    check(PROBLEM, plan)
    return plan


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(solvers, f"has_{name}", lambda: False)


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> Any:
        raise error

    for name in ("highs", "cbc"):
        monkeypatch.setitem(solvers._SOLVE, name, fail)


def test_what_highs_does_not_come_back_from_is_given_up() -> None:
    """HiGHS may repeat one pivot for ever; the next program is solved by another process."""
    program = LinearProgram()
    few = program.column("x", 0, 3, is_whole=True)
    program.objective = -few
    end_waiting()
    given_up = solve_elsewhere(program, {}, UNLIMITED, patience_s=0.0)
    assert given_up.is_stuck
    assert given_up.values is None
    assert solve_elsewhere(program, {}, UNLIMITED).is_optimal


def test_a_program_may_ask_for_other_threads_than_the_one_before() -> None:
    """Policy `autotm` leaves their number to HiGHS; one process solves it and what comes after."""
    statuses = []
    for threads in (None, 1, 2):
        program = LinearProgram()
        few = [program.column(f"x{index}", 0, 3, is_whole=True) for index in range(2)]
        program.objective = -few[0] - 2 * few[1]
        program.add(few[0] + few[1] <= 4.5)
        asked = {} if threads is None else {"threads": threads}
        answer = solve_elsewhere(program, asked, UNLIMITED)
        assert answer.values is not None
        statuses.append((answer.status, *answer.values))
    assert statuses == [("optimal", 1.0, 3.0)] * 3


def test_what_a_program_is_written_with_counts_as_arithmetic_does() -> None:
    program = LinearProgram()
    x, y = program.column("x"), program.column("y", high=5.0)
    assert x.terms == {0: 1.0}
    both = 2.0 * x - (y + 1.0) + np.float64(0.5) * y
    assert both.at(np.array([3.0, 4.0])) == 2 * 3 - 5 + 0.5 * 4
    assert (1.0 - both).at(np.array([3.0, 4.0])) == -2.0
    assert summed([x, 1.5, both, -x]).at(np.array([3.0, 4.0])) == 1.5 + 3.0
    program.add(both <= y)
    program.add(x + y >= 2.0)
    program.add(x - x == 0.0)
    matrix = program.matrix
    assert [*zip(matrix.row_lower, matrix.row_upper, strict=True)] == [
        (-math.inf, 1.0),
        (2.0, math.inf),
        (0.0, 0.0),
    ]
    assert matrix.start.tolist() == [0, 2, 4, 4]  # what has gone from a row is no entry
    assert matrix.index.tolist() == [0, 1, 0, 1]
    assert matrix.value.tolist() == [2.0, -1.5, 1.0, 1.0]
    assert matrix.col_upper.tolist() == [math.inf, 5.0]


def rounding(*, relaxed: bool = False) -> Program:
    """The program of the step with its large clusters whole and the others split."""
    mib = [PROBLEM.budgets[tier] / MIB for tier in (Tier.DEVICE, Tier.HOST)]
    space = decision_space(PROBLEM)
    return Program(space, mib[0], mib[1], relaxed=relaxed, whole=False, large_bytes=1.0)


def solved(program: Program, known_s: float = math.inf) -> Solution:
    return solve_program(
        program, "highs", work=Allowance(Meter(), 10.0), gap=0.0, seed=0, known_s=known_s
    )


def test_a_relaxation_is_not_rounded_where_something_as_fast_is_known() -> None:
    full = solved(rounding())
    assert full.decisions is not None
    left = solved(rounding(), known_s=0.5 * full.bound_s)
    assert left.decisions is None
    assert left.claim_s == pytest.approx(full.bound_s)


@pytest.mark.parametrize("relaxed", [False, True])
def test_the_relaxation_bounds_a_program_that_nothing_more_is_found_for(
    monkeypatch: pytest.MonkeyPatch, relaxed: bool
) -> None:
    """A relaxation that was solved says what nothing is faster than, also where time ends then."""
    full = solved(rounding(relaxed=relaxed))
    run = solvers._run_highs

    def only_relaxations(*arguments: Any, whole: bool = True, **how: Any) -> SolverAnswer:
        if not whole:
            return run(*arguments, whole=whole, **how)
        return SolverAnswer("time limit reached", None, math.inf, -math.inf, {})

    monkeypatch.setattr(solvers, "_run_highs", only_relaxations)
    cut_short = solved(rounding(relaxed=relaxed))
    assert cut_short.decisions is None
    assert 0 < cut_short.claim_s <= full.bound_s * (1 + 1e-6)


def test_highs_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve(PROBLEM, SETTINGS)
    assert capfd.readouterr() == ("", "")


def test_without_highs_cbc_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "highs")
    plan = sound(solve(PROBLEM, SETTINGS))
    assert plan.notes[0] == "the solver highs is not installed; cbc has taken its place"
    assert plan.report is not None
    assert plan.report.solver == "cbc"


def test_without_any_solver_the_plan_is_that_of_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "highs", "cbc")
    plan = sound(solve(PROBLEM, SETTINGS))
    (note,) = plan.notes
    assert note.startswith("the solver highs failed (OptionError: no solver found: install highspy")
    assert note.endswith(f"the plan is: {plan_words(plan.placement.policy)}")
    assert plan.report is not None
    assert plan.report.solver == "rules"
    assert plan.report.status == "failed"
    updates = {name for group in PROBLEM.dataflow.updates for name in group.ops}
    stays_s = sum(s for name, s in PROBLEM.costs.device_s.items() if name not in updates)
    assert 0 < plan.report.lower_bound_s <= stays_s


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Error while executing cbc\nsee its log"),
        MemoryError(),
        RuntimeError("HiGHS returned kError"),
        ValueError("nan"),
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_solver_that_fails_costs_no_plan(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    fails_with(monkeypatch, error)
    (note,) = sound(solve(PROBLEM, SETTINGS)).notes
    assert f"the solver highs failed ({type(error).__name__}" in note
    assert "\n" not in note


def test_the_program_alone_says_that_its_solver_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, RuntimeError("HiGHS returned kError"))
    with pytest.raises(PlanError, match=r"solver failed \(RuntimeError: HiGHS .* policy 'auto'"):
        solve(PROBLEM, SolveSettings("ilp", work_limit=1.0))


def test_the_program_alone_says_that_its_work_was_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(program: Program, solver: str, *, work: Allowance, **_: object) -> Solution:
        work.meter.charge(work.left)
        return Solution("work limit reached", None, math.inf, math.inf, 0.0, 0.0)

    monkeypatch.setattr("cotrain_compile.placement.search.programs.solve_program", stopped)
    with pytest.raises(PlanError, match=r"no plan within its limit.*work_limit.*policy 'auto'"):
        solve(PROBLEM, SolveSettings("ilp", work_limit=0.3))


@pytest.mark.parametrize("policy", ["ilp", "lp-round"])
def test_a_program_that_rules_plans_out_late_is_not_short_of_work(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """More work would not help it: there is the greedy's plan, and the plan says so."""

    def ruled_out(program: Program, solver: str, *, work: Allowance, **_: object) -> Solution:
        del work
        return Solution("infeasible", None, math.inf, math.inf, 0.0, 0.0)

    monkeypatch.setattr("cotrain_compile.placement.search.programs.solve_program", ruled_out)
    (note,) = sound(solve(PROBLEM, SolveSettings(policy, work_limit=1.0))).notes
    assert note == f"nothing that {policy} decided fits in the budget; the plan is: greedy choice"


def test_a_search_takes_as_long_as_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> float:
        time.sleep(0.5)
        return 0.0

    monkeypatch.setattr("cotrain_compile.placement.search.solve.certified_bound_s", slow)
    report = sound(solve(PROBLEM, SolveSettings("greedy"))).report
    assert report is not None
    assert report.seconds >= 0.5


def test_ctrl_c_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        solve(PROBLEM, SolveSettings("ilp", work_limit=1.0))


def test_with_hardly_any_work_there_is_a_plan() -> None:
    plan = sound(solve(PROBLEM, SolveSettings("auto", work_limit=1e-6)))
    assert plan.report is not None
    assert plan.report.simulated_s


def test_highs_without_a_bound_of_its_own_has_that_of_its_relaxation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped early it says minus infinity, where it has a solution, too."""
    run = solvers._run_highs
    monkeypatch.setattr(
        solvers, "_run_highs", lambda *a, **k: replace(run(*a, **k), bound=-math.inf)
    )
    plan = sound(solve(PROBLEM, SolveSettings("auto", work_limit=60.0)))
    assert plan.report is not None
    assert plan.report.objective_s is not None
    bound_s = plan.report.bound_s
    assert bound_s is not None
    assert 0 < bound_s <= plan.predicted.makespan_s
