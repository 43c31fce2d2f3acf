"""Solvers: a `Program` by HiGHS or CBC, with limited work and repeatably."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeAlias

from cotrain_compile.errors import OptionError
from cotrain_compile.placement.decisions.decisions import Decisions
from cotrain_compile.placement.milp.highs_process import SolverAnswer, has_highs, solve_elsewhere
from cotrain_compile.placement.milp.linear import Column, Floats
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.work import Allowance, SolverWork

# One thread: with more, HiGHS may return another of several equally good plans each time.
THREADS = 1
# The part of the work for what a relaxation leaves undecided, where any good solution will do.
ROUNDING = 0.4
# HiGHS is given up after so many seconds of a processor, and so many more for each unit of work.
FIRST_S, PATIENCE = 5.0, 10.0
# The status of a program that was left at its bound.
NOT_BETTER = "no better than what is known"
# The status of one that has spent its work.
WORK_LIMIT = "work limit reached"

# A status, a bound in milliseconds, and what the columns are, where that is a solution.
_Found: TypeAlias = tuple[str, float, Floats | None]


@dataclass(frozen=True)
class SolverLimits:
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

    Raises `OptionError` when neither is there.
    """
    if solver == "highs" and has_highs():
        return "highs"
    if has_cbc():
        return "cbc"
    raise OptionError("no solver found: install highspy (pip install highspy)")


def has_cbc() -> bool:
    """Whether CBC is there, which comes with pulp."""
    try:
        from cotrain_compile.placement.milp.cbc_process import is_available
    except ImportError:
        return False
    return is_available()


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
    limits = SolverLimits(work, gap, seed, 1e3 * known_s)
    try:
        status, bound_ms, values = _SOLVE[pick(solver)](program, limits)
    except Exception as error:  # foreign code: numpy, a library, another program
        return failed(error, time.monotonic() - began)
    nothing = inf
    return Solution(
        status,
        decisions_of(program, values) if values is not None else None,
        program.step.at(values) / 1e3 if values is not None else nothing,
        program.linear.objective.at(values) / 1e3 if values is not None else nothing,
        bound_ms / 1e3,
        time.monotonic() - began,
        is_loose=program.is_loose,
    )


def failed(error: Exception, seconds: float = 0.0) -> Solution:
    """No solution, because of `error`, after so many seconds."""
    told = " ".join(f"{type(error).__name__}: {error}".split())
    nothing = float("inf")
    return Solution("failed", None, nothing, nothing, 0.0, seconds, failure=told)


def decisions_of(program: Program, values: Floats) -> Decisions:
    """The decisions in a solved program; of a split cluster the strategy with the largest share."""

    def shares_of(columns: Sequence[Column]) -> list[float]:
        return [float(values[column.number]) for column in columns]

    params = []
    for decision, columns in zip(program.space.params, program.params, strict=True):
        shares = shares_of(columns)
        params.append(decision.strategies[shares.index(max(shares))])
    activations = []
    for kept, columns in zip(program.space.activations, program.activations, strict=True):
        shares = shares_of(columns)
        # What is not chosen is kept, and of two halves that is the first.
        shares.insert(0, 1.0 - sum(shares))
        activations.append(kept.strategies[shares.index(max(shares))])
    # The mean level of a region; at level n it is with the share of the n-th column.
    levels = [
        sum(number * share for number, share in enumerate(shares_of(columns), 1))
        for columns in program.levels
    ]
    return Decisions(tuple(params), tuple(activations), tuple(levels))


def _highs(program: Program, limits: SolverLimits) -> _Found:
    """Solve the relaxation; then with what it leaves undecided; then, from there, the whole.

    The relaxation says what no solution takes less than, whatever comes of the rest.
    """
    choices = program.linear.whole
    rounding = _Rounded()
    if choices:
        share = 0.4 if program.is_whole else 0.8
        rounding = _round(program, choices, replace(limits, work=limits.work.part(share)))
        if rounding.is_infeasible:
            return "infeasible", 0.0, None
        if program.is_rounding and rounding.least_ms > limits.known_ms:
            return NOT_BETTER, rounding.least_ms, None
        if program.is_rounding and rounding.values is not None:
            return "rounded", rounding.least_ms, rounding.values
    if rounding.is_whole:
        return "optimal", rounding.least_ms, rounding.values
    if not limits.work.left:
        found = rounding.relaxed if rounding.values is None else rounding.values
        return WORK_LIMIT, rounding.least_ms, found
    known = rounding.known(choices)
    answer = _run_highs(program, limits, start=known)
    status = WORK_LIMIT if answer.status == "iteration limit reached" else answer.status
    if choices:
        # Stopped early, HiGHS may have no bound but minus infinity.
        return status, max(rounding.least_ms, answer.bound), answer.values
    if not answer.is_optimal:
        return status, 0.0, answer.values  # at a value that it may yet fall below
    above = program.is_rounding and answer.objective > limits.known_ms
    return NOT_BETTER if above else status, answer.objective, None if above else answer.values


@dataclass(frozen=True)
class _Rounded:
    """`values` of a good solution, None where none was found; none has less than `least_ms`.

    `relaxed` are those of the relaxation, where that is solved. Where it decides all as a whole, it
    `is_whole`, and nothing is better.
    """

    values: Floats | None = None
    least_ms: float = 0.0
    relaxed: Floats | None = None
    is_infeasible: bool = False
    is_whole: bool = False

    def known(self, choices: Sequence[Column]) -> dict[int, float]:
        """What the whole columns are there."""
        if self.values is None:
            return {}
        return {column.number: float(round(self.values[column.number])) for column in choices}


def _round(program: Program, choices: Sequence[Column], limits: SolverLimits) -> _Rounded:
    """A good solution soon, and a bound: keep what the relaxation decides, solve for the rest.

    Relaxation enforced neighbourhood search (Berthold 2014), in its simplest form.
    """
    relaxed = _run_highs(program, limits, whole=False)
    if relaxed.is_infeasible:
        return _Rounded(is_infeasible=True)
    if not relaxed.is_optimal or relaxed.values is None:
        return _Rounded()
    least_ms, values = relaxed.objective, relaxed.values
    shares = ((column.number, float(values[column.number])) for column in choices)
    decided = {n: float(round(share)) for n, share in shares if abs(share - round(share)) < 1e-3}
    if len(decided) == len(choices):
        return _Rounded(values, least_ms, values, is_whole=True)
    if not limits.work.left or (program.is_rounding and least_ms > limits.known_ms):
        return _Rounded(None, least_ms, values)
    work = limits.work.part(ROUNDING) if program.is_rounding else limits.work
    # What is left may well have no solution.
    rest = _run_highs(program, replace(limits, work=work), fixed=decided)
    return _Rounded(rest.values, least_ms, values)


def _run_highs(program: Program, limits: SolverLimits, **how: Any) -> SolverAnswer:
    """As `solve_elsewhere`, with its work.

    What HiGHS is stuck in is given up long after any other would be solved, and has spent it all.
    """
    work, entries = limits.work, SolverWork(len(program.linear.matrix.value))
    patience_s = FIRST_S + PATIENCE * work.left
    options = {
        "mip_rel_gap": limits.gap,
        "threads": THREADS,
        "random_seed": limits.seed,
        "time_limit": work.meter.guard_s,
    }
    limits_of_each = entries.limits(work.left)
    answer = solve_elsewhere(program.linear, options, limits_of_each, patience_s=patience_s, **how)
    work.meter.charge(work.left if answer.is_stuck else entries.units(answer.done))
    return answer


def _cbc(program: Program, limits: SolverLimits) -> _Found:
    # Its base is pulp's: it can be defined only where that is.
    from cotrain_compile.placement.milp.cbc_process import solve_by_cbc

    limit_s = min(limits.work.left, limits.work.meter.guard_s)  # CBC counts no work
    began = time.monotonic()
    status, is_stopped, values = solve_by_cbc(
        program.linear, limit_s=limit_s, gap=limits.gap, seed=limits.seed, threads=THREADS
    )
    limits.work.meter.charge(time.monotonic() - began)
    if values is None or is_stopped:
        return status, 0.0, values  # the bound that it had reached is not passed on
    return status, program.linear.objective.at(values) / (1.0 + limits.gap), values


_SOLVE: Mapping[str, Callable[[Program, SolverLimits], _Found]] = {"highs": _highs, "cbc": _cbc}
