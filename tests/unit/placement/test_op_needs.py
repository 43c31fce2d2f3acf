"""Op needs: nothing is faster than the bound that knows what single ops need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.machine import MEMORIES, Network, Tier
from cotrain_compile.placement.decisions.decisions import Decisions
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp.bound import certified_bound_s
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import solve_program
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import draft, shortfall_bytes
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.repair import repaired
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.presets import find
from tests.support.dataflows import chain
from tests.support.examples import examples
from tests.support.exchanging import exchanging
from tests.support.nets import MIB, STEPS
from tests.support.random_problems import PLENTY, problems, with_budget


@given(problems(most=2), st.data())
@examples(20)
def test_no_decisions_about_single_ops_are_faster_than_the_bound(
    problem: Problem, data: st.DataObject
) -> None:
    """In just what they need, as they are drawn and repaired down to the least."""
    space = decision_space(problem, None, everything=True)
    decisions = Decisions(
        tuple(data.draw(st.sampled_from(d.strategies)) for d in space.params),
        tuple(data.draw(st.sampled_from(d.strategies)) for d in space.activations),
    )
    placement, least = space.placement("drawn", decisions), least_of(problem)
    moves = moves_of(problem, placement)
    if data.draw(st.booleans()):
        placement, moves = repaired(problem, placement, moves, lambda: least, least.nbytes)
    tight = with_budget(problem, shortfall_bytes(with_budget(problem, 0), moves))
    bound_s = certified_bound_s(tight, "highs", work=Allowance(Meter(), 10), seed=0, cyclic=False)
    assert bound_s <= draft(tight, placement).step_s * (1 + 1e-6)


def test_an_update_may_run_while_the_last_exchange_is_awaited() -> None:
    """The wait between them takes no time of the device, and it waits all the same."""
    step = exchanging(chain(2, width=2048, batch=64), most_under_way=1)
    machine = find("rtx4090").but(network=Network(1e9))
    free = formulate(step, machine, dict.fromkeys(MEMORIES, PLENTY))
    bound_s = certified_bound_s(free, "highs", work=Allowance(Meter(), 10), seed=0, cyclic=False)
    early = replace(resident(step), early_updates=True)
    found = draft(free, early)
    assert found.moved
    assert bound_s <= found.step_s * (1 + 1e-6)


def relaxed_s(problem: Problem, *, by_op: bool) -> float:
    """The optimum of the relaxed program, with what single ops need or without."""
    space = decision_space(problem, at_peaks=True, everything=True, by_op=by_op)
    budgets_mib = (problem.budgets[tier] / MIB for tier in (Tier.DEVICE, Tier.HOST))
    program = Program(space, *budgets_mib, relaxed=True)
    return solve_program(program, "highs", work=Allowance(Meter(), 10), gap=1e-4, seed=0).bound_s


@pytest.mark.parametrize("name", ["clipped", "tied"])
def test_what_single_ops_need_makes_the_bound_tighter(name: str) -> None:
    """At the least, where a single op decides what has to be offloaded."""
    dataflow = STEPS[name](3, MIB, 2 * MIB)
    free = formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    tight = with_budget(free, least_of(free).nbytes)
    assert relaxed_s(tight, by_op=True) > 1.001 * relaxed_s(tight, by_op=False)
