"""Solvers: a `Program` through pulp, by HiGHS or CBC, with limited work and repeatably."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from cotrain_compile.errors import OptionError
from cotrain_compile.placement.decisions.decisions import Decisions
from cotrain_compile.placement.milp.linear import pulp
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.work import Allowance

# One thread: with more, HiGHS may return another of several equally good plans each time.
THREADS = 1
# The part of the work for what a relaxation leaves undecided, where any good solution will do.
ROUNDING = 0.4
# The status of a program that was left at its bound.
NOT_BETTER = "no better than what is known"
# The status of one that has spent its work.
WORK_LIMIT = "work limit reached"


@dataclass(frozen=True)
class Limits:
    """How far to solve a program; one that is rounded only where it may be below `known_ms`."""

    work: Allowance
    gap: float
    seed: int
    known_ms: float


@dataclass(frozen=True)
class Solution:
    """What a solver found. `step_s` is by the program's own model.

    `objective_s` is the step time with the price of what moves, `bound_s` is a bound on that.
    `decisions` is None where there is no solution or none was found in time. `failure` says in
    words how the solver failed, "" where it did not. `is_loose` is the program's.
    """

    status: str
    decisions: Decisions | None
    step_s: float
    objective_s: float
    bound_s: float
    seconds: float
    failure: str = ""
    is_loose: bool = False

    @property
    def is_infeasible(self) -> bool:
        """Whether there is no solution."""
        return self.decisions is None and "infeasible" in self.status

    @property
    def is_cut_short(self) -> bool:
        """Whether more work may give what is missing: there is no solution, and none is ruled out.

        A solver that failed was not short of work.
        """
        return self.decisions is None and not self.is_infeasible and not self.failure

    @property
    def claim_s(self) -> float:
        """What no solution of the program takes less than, where this is one of its relaxation.

        A loose program pays for what it lacks, which says nothing of plans that lack nothing.
        """
        return 0.0 if self.is_loose else min(self.step_s, self.bound_s)


def pick(solver: str) -> str:
    """The solver to use: "highs" or "cbc"; "highs" becomes "cbc" where it is not installed.

    Raises `OptionError` when neither is there, or no pulp.
    """
    if solver == "highs" and pulp.HiGHS(msg=False).available():
        return "highs"
    if _cbc().available():
        return "cbc"
    raise OptionError("no solver found: install highspy (pip install highspy)")


def solve_program(
    program: Program,
    solver: str,
    *,
    work: Allowance,
    gap: float,
    seed: int,
    known_s: float = inf,
) -> Solution:
    """Solve `program` to within `gap`, a fraction, or as far as it gets with `work`.

    One that is rounded is left at its bound where its relaxation is above `known_s`: what is known
    is as fast. Also where there is no solver, and whatever happens in it: then the solution has a
    `failure`.
    """
    began = time.monotonic()
    limits = Limits(work, gap, seed, 1e3 * known_s)
    try:
        status, bound_ms = _SOLVE[pick(solver)](program, limits)
    except Exception as error:  # foreign code: pulp, numpy, a library, another program
        return failed(error, time.monotonic() - began)
    solved = (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    found = status != NOT_BETTER and program.model.sol_status in solved
    return Solution(
        status,
        decisions_of(program) if found else None,
        float(pulp.value(program.step)) / 1e3 if found else float("inf"),
        float(program.model.objective.value()) / 1e3 if found else float("inf"),
        bound_ms / 1e3,
        time.monotonic() - began,
        is_loose=program.is_loose,
    )


def failed(error: Exception, seconds: float = 0.0) -> Solution:
    """No solution, because of `error`, after so many seconds."""
    told = " ".join(f"{type(error).__name__}: {error}".split())
    nothing = float("inf")
    return Solution("failed", None, nothing, nothing, 0.0, seconds, failure=told)


def decisions_of(program: Program) -> Decisions:
    """The decisions in a solved program; of a split cluster the strategy with the largest share."""
    params = []
    for decision, variables in zip(program.space.params, program.params, strict=True):
        shares = [variable.value() or 0.0 for variable in variables]
        params.append(decision.strategies[shares.index(max(shares))])
    activations = []
    for kept, variables in zip(program.space.activations, program.activations, strict=True):
        shares = [variable.value() or 0.0 for variable in variables]
        # What is not chosen is kept, and of two halves that is the first.
        shares.insert(0, 1.0 - sum(shares))
        activations.append(kept.strategies[shares.index(max(shares))])
    return Decisions(tuple(params), tuple(activations), tuple(map(_mean, program.levels)))


def _mean(variables: Sequence[Any]) -> float:
    """The mean level of a region; at level n it is with the share of the n-th variable."""
    return sum(number * float(v.value() or 0.0) for number, v in enumerate(variables, 1))


def _highs(program: Program, limits: Limits) -> tuple[str, float]:
    """Solve the relaxation; then with what it leaves undecided; then, from there, the whole.

    The relaxation says what no solution takes less than, whatever comes of the rest.
    """
    choices = [v for v in program.model.variables() if v.cat == pulp.LpInteger]
    known: dict[str, float] = {}
    least_ms = 0.0
    if choices:
        share = 0.4 if program.is_whole else 0.8
        rounding = replace(limits, work=limits.work.part(share))
        known, least_ms = _round(program, choices, rounding)
        if program.model.status == pulp.LpStatusInfeasible and not known:
            return "infeasible", 0.0
        if program.is_rounding and least_ms > limits.known_ms:
            return NOT_BETTER, least_ms
        if program.is_rounding and known:
            return "rounded", least_ms
    if not limits.work.left:
        return WORK_LIMIT, least_ms
    highs = _run_highs(program, limits, known)
    status = str(highs.modelStatusToString(highs.getModelStatus())).lower()
    status = WORK_LIMIT if status == "iteration limit reached" else status
    if choices:
        # Stopped early, HiGHS may have no bound but minus infinity.
        return status, max(least_ms, float(highs.getInfo().mip_dual_bound))
    if status != "optimal":
        return status, 0.0  # stopped early, it is at a value that it may yet fall below
    least_ms = float(program.model.objective.value())
    above = program.is_rounding and least_ms > limits.known_ms
    return NOT_BETTER if above else status, least_ms


def _round(
    program: Program, choices: Sequence[Any], limits: Limits
) -> tuple[dict[str, float], float]:
    """A good solution soon, and a bound: keep what the relaxation decides, solve for the rest.

    Relaxation enforced neighbourhood search (Berthold 2014), in its simplest form.
    """
    _run_highs(program, limits, {}, whole=False)
    if program.model.status == pulp.LpStatusInfeasible:
        return {}, 0.0
    decided = [(v, round(v.value())) for v in choices if abs(v.value() - round(v.value())) < 1e-3]
    if program.model.sol_status != pulp.LpSolutionOptimal:
        return {}, 0.0
    least_ms = float(program.model.objective.value())
    if len(decided) == len(choices):
        return {v.name: float(value) for v, value in decided}, least_ms
    if program.is_rounding and least_ms > limits.known_ms:
        return {}, least_ms
    if not limits.work.left:
        return {}, least_ms
    for variable, value in decided:
        variable.bounds(value, value)
    work = limits.work.part(ROUNDING) if program.is_rounding else limits.work
    _run_highs(program, replace(limits, work=work), {})
    found = program.model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    program.model.status = pulp.LpStatusNotSolved  # what is left may well be infeasible
    values = {v.name: float(round(v.value())) for v in choices} if found else {}
    for variable, _ in decided:
        variable.bounds(0, 1)
    return values, least_ms


def _run_highs(
    program: Program, limits: Limits, known: Mapping[str, float], *, whole: bool = True
) -> Any:
    # Its base is pulp's: it can be defined only where that is.
    from cotrain_compile.placement.milp.warm_highs import WarmHighs

    solver = WarmHighs(
        mip=whole,
        msg=False,
        gapRel=limits.gap,
        threads=THREADS,
        random_seed=limits.seed,
    )
    solver.work = limits.work
    if known:
        column = {variable.name: index for index, variable in enumerate(program.model.variables())}
        solver.start = [(column[name], value) for name, value in known.items()]
    program.model.solve(solver)
    return program.model.solverModel


def _cbc_solve(program: Program, limits: Limits) -> tuple[str, float]:
    # Its base is pulp's: it can be defined only where that is.
    from cotrain_compile.placement.milp.cbc_process import Cbc

    options = [f"randomCbcSeed {limits.seed}"]
    limit_s = min(limits.work.left, limits.work.meter.guard_s)  # CBC counts no work
    began = time.monotonic()
    solver = _cbc(Cbc, timeLimit=limit_s, gapRel=limits.gap, options=options)
    program.model.solve(solver)
    limits.work.meter.charge(time.monotonic() - began)
    status = str(pulp.LpStatus[program.model.status]).lower()
    if program.model.sol_status == pulp.LpSolutionIntegerFeasible:
        return "time limit reached", 0.0  # pulp does not pass on the bound it had reached
    objective = program.model.objective.value() or 0.0
    return status, float(objective) / (1.0 + limits.gap)


def _cbc(kind: type[Any] | None = None, **settings: Any) -> Any:
    with warnings.catch_warnings():
        # pulp 3.3 announces that its bundled CBC will become a package of its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        return (kind or pulp.PULP_CBC_CMD)(msg=False, threads=THREADS, **settings)


_SOLVE = {"highs": _highs, "cbc": _cbc_solve}
