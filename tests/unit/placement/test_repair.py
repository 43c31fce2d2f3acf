"""Repair: what does not fit does afterwards, and what fits is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.decisions import Decisions
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.decisions.strategies import Strategy
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.greedy import least_memory
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.repair import repaired
from cotrain_compile.plan import Placement, UpdateMode
from cotrain_compile.presets import find
from tests.support.examples import examples
from tests.support.nets import MIB, STEPS
from tests.support.random_problems import PLENTY, problems, with_budget


def drawn(problem: Problem, data: st.DataObject) -> Placement:
    """Any decisions about a step in a few buckets."""
    space = decision_space(problem, data.draw(st.integers(1, 8)))
    decisions = Decisions(
        tuple(data.draw(st.sampled_from(d.strategies)) for d in space.params),
        tuple(data.draw(st.sampled_from(d.strategies)) for d in space.activations),
    )
    return space.placement("drawn", decisions)


@given(problems(), st.data())
@examples(20)
def test_what_is_repaired_fits_and_stays_as_it_is(problem: Problem, data: st.DataObject) -> None:
    """At any budget from the least on: no slot has more alive, and a second time nothing changes.

    Nothing comes back that was offloaded.
    """
    placement, least = drawn(problem, data), least_of(problem)
    budget = data.draw(st.sampled_from([least.nbytes, problem.budgets[Tier.DEVICE]]))
    before = moves_of(problem, placement)
    found, after = repaired(problem, placement, before, lambda: least, budget)
    assert after == moves_of(problem, found)
    assert max(after.slot_bytes) <= min(budget, max(before.slot_bytes))
    assert repaired(problem, found, after, lambda: least, budget) == (found, after)


@given(problems(most=2), st.data())
@examples(10)
def test_at_the_least_what_is_repaired_is_a_plan(problem: Problem, data: st.DataObject) -> None:
    """With all that leaves at the last moment, no update on the device is in the way."""
    least = least_of(problem)
    tight = with_budget(problem, least.nbytes)
    placement = drawn(tight, data)
    found, moves = repaired(tight, placement, moves_of(tight, placement), lambda: least, 0)
    check(tight, schedule(tight, found))
    assert max(moves.slot_bytes) == pytest.approx(least.nbytes, rel=0, abs=0)


def test_at_the_least_step_counters_are_streamed_too_and_updates_stay() -> None:
    """Where all has left for the peak but the counters, four bytes of each are what is missing."""
    dataflow = STEPS["tied"](3, 8 * MIB, MIB)
    problem = formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    least, space = least_of(problem), decision_space(problem, None, everything=True)
    streamed = Decisions(
        (Strategy(UpdateMode.STREAMED, 2),) * len(space.params), least_memory(space).activations
    )
    placement = space.placement("drawn", streamed)
    counters = [
        state
        for group in dataflow.updates
        for state in group.states
        if dataflow.buffer[state].nbytes == 4
    ]
    moves = moves_of(problem, placement)
    assert max(moves.slot_bytes) == least.nbytes + 4 * len(counters)
    found, _ = repaired(problem, placement, moves, lambda: least, least.nbytes)
    assert found.updates == placement.updates
    tight = with_budget(problem, least.nbytes)
    check(tight, schedule(tight, found))
    nearly, _ = repaired(problem, placement, moves, lambda: least, least.nbytes + 4)
    assert [nearly.homes[state] for state in counters].count(Tier.DEVICE) == 1
