"""A solver that is absent, fails or has no time: simpler ways give the plan, said in one line."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pulp
import pytest

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp import solvers
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import Solution, solve_program
from cotrain_compile.placement.milp.warm_highs import WarmHighs
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Plan
from tests.support.dataflows import mixed_precision_step
from tests.unit.placement.test_solve import problem_of

PROBLEM = problem_of(mixed_precision_step(3, params=500_000), 0.5)
SETTINGS = SolveSettings("auto", work_limit=10.0)


def sound(plan: Plan) -> Plan:
    check(PROBLEM, plan)
    return plan


def absent(monkeypatch: pytest.MonkeyPatch, *classes: type) -> None:
    for solver in classes:
        monkeypatch.setattr(solver, "available", lambda self: False)


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> Any:
        raise error

    for name in ("highs", "cbc"):
        monkeypatch.setitem(solvers._SOLVE, name, fail)


def test_a_program_may_ask_for_other_threads_than_the_one_before() -> None:
    """Policy `autotm` leaves their number to HiGHS; one process solves it and what comes after."""
    statuses = []
    for threads in (None, 1, 2):
        model = pulp.LpProblem(sense=pulp.LpMaximize)
        few = [model.add_variable(f"x{index}", 0, 3, pulp.LpInteger) for index in range(2)]
        model += few[0] + 2 * few[1]
        model += few[0] + few[1] <= 4.5
        model.solve(WarmHighs(msg=False, threads=threads))
        statuses.append((model.status, pulp.value(model.objective)))
    assert statuses == [(pulp.LpStatusOptimal, 7.0)] * 3


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

    def only_relaxations(program: Program, *arguments: Any, whole: bool = True) -> Any:
        if not whole:
            return run(program, *arguments, whole=whole)
        program.model.sol_status = pulp.LpSolutionNoSolutionFound
        status = {"getModelStatus": lambda: 13, "modelStatusToString": lambda _: "Time limit"}
        return SimpleNamespace(**status, getInfo=lambda: SimpleNamespace(mip_dual_bound=-math.inf))

    monkeypatch.setattr(solvers, "_run_highs", only_relaxations)
    cut_short = solved(rounding(relaxed=relaxed))
    assert cut_short.decisions is None
    assert 0 < cut_short.claim_s <= full.bound_s * (1 + 1e-6)


def test_highs_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve(PROBLEM, SETTINGS)
    assert capfd.readouterr() == ("", "")


def test_without_highs_cbc_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, pulp.HiGHS)
    plan = sound(solve(PROBLEM, SETTINGS))
    assert plan.notes[0] == "the solver highs is not installed; cbc has taken its place"
    assert plan.report is not None
    assert plan.report.solver == "cbc"


def test_without_any_solver_the_plan_is_that_of_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, pulp.HiGHS, pulp.PULP_CBC_CMD)
    plan = sound(solve(PROBLEM, SETTINGS))
    (note,) = plan.notes
    assert note.startswith("the solver highs failed (OptionError: no solver found: install highspy")
    assert note.endswith(f"the plan is that of {plan.placement.policy}")
    assert plan.report is not None
    assert plan.report.solver == "rules"
    assert plan.report.status == "failed"
    updates = {name for group in PROBLEM.dataflow.updates for name in group.ops}
    stays_s = sum(s for name, s in PROBLEM.costs.device_s.items() if name not in updates)
    assert 0 < plan.report.lower_bound_s <= stays_s


@pytest.mark.parametrize(
    "error",
    [
        pulp.PulpSolverError("Pulp: Error while executing cbc\nsee its log"),
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
    assert note == f"nothing that {policy} decided fits in the budget; the plan is that of greedy"


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

    class Stopped:
        def __init__(self, highs: Any) -> None:
            self.highs = highs

        def __getattr__(self, name: str) -> Any:
            return getattr(self.highs, name)

        def getInfo(self) -> Any:  # noqa: N802 (HiGHS' name)
            return SimpleNamespace(mip_dual_bound=float("-inf"))

    run = solvers._run_highs
    monkeypatch.setattr(solvers, "_run_highs", lambda *a, **k: Stopped(run(*a, **k)))
    plan = sound(solve(PROBLEM, SolveSettings("auto", work_limit=60.0)))
    assert plan.report is not None
    assert plan.report.objective_s is not None
    bound_s = plan.report.bound_s
    assert bound_s is not None
    assert 0 < bound_s <= plan.predicted.makespan_s
