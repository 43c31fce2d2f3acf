"""Loose: a program whose copies may be beyond the budget is solved wherever there is a plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import Solution, solve_program
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.greedy import least_bytes
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.work import Allowance, Meter
from tests.support.examples import examples
from tests.support.random_problems import problems, with_budget


@given(problems(), st.booleans())
@examples(20)
def test_a_loose_program_has_a_solution_and_asks_no_more(problem: Problem, at_least: bool) -> None:
    """At the least, too. A solution of the conservative program is one of the loose one."""
    if at_least:
        problem = with_budget(problem, least_of(problem).nbytes)
    least = least_bytes(decision_space(problem))
    need_mib = max(problem.budgets[Tier.DEVICE], least) / MIB
    conservative, loose = solved(problem), solved(problem, need_mib)
    assert loose.decisions is not None
    assert conservative.is_infeasible or loose.bound_s <= conservative.bound_s * 1.001


def solved(problem: Problem, need_mib: float | None = None) -> Solution:
    """The conservative program of `problem`, loose or not, rounded."""
    device_mib, host_mib = (problem.budgets[tier] / MIB for tier in (Tier.DEVICE, Tier.HOST))
    space = decision_space(problem)
    program = Program(space, device_mib, host_mib, whole=False, need_mib=need_mib)
    return solve_program(program, "highs", work=Allowance(Meter(), 10), gap=1e-3, seed=0)
