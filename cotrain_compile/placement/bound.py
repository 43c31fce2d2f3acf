"""Bound: the step time that no plan within the budgets can beat, by the relaxed program.

What it certifies, and under which assumptions, is in `docs/placement.md`.
"""

from __future__ import annotations

from math import isfinite

from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.find_choices import choices_of
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.program import Program
from cotrain_compile.placement.program_model import MIB
from cotrain_compile.placement.solvers import solve_program

# The bound is stated to a tenth of a percent, however roughly a plan is looked for.
GAP = 1e-3


def certified_bound_s(
    problem: Problem, solver: str, *, time_limit_s: float, seed: int, cyclic: bool
) -> float:
    """The optimum of the relaxed program in seconds; `cyclic` where steps overlap.

    Where time runs out, the solver's bound on it; 0 where there is none, or no solver.
    """
    try:
        relaxed = Program(
            choices_of(problem, at_peaks=True, everything=True),
            problem.budgets[Tier.DEVICE] / MIB,
            problem.budgets[Tier.HOST] / MIB,
            relaxed=True,
            cyclic=cyclic,
        )
    except OptionError:  # pulp cannot be imported
        return 0.0
    solution = solve_program(relaxed, solver, time_limit_s=time_limit_s, gap=GAP, seed=seed)
    return max(0.0, solution.bound_s) if isfinite(solution.bound_s) else 0.0
