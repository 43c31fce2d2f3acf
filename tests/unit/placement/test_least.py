"""Least is least: what a refusal states is enough, no byte less is, and no machine changes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import MEMORIES, Machine
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.decisions import Decisions
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import shortfall_bytes
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.presets import find
from tests.support.examples import examples
from tests.support.random_problems import PLENTY, machines, problems, training_steps, with_budget

PRESETS = ("rtx4090", "h100", "gh200")


@given(problems(most=2))
@examples(6)
def test_at_the_least_there_is_a_plan_and_a_byte_below_none(problem: Problem) -> None:
    settings = SolveSettings(work_limit=1)
    with pytest.raises(PlacementError) as refusal:
        solve(with_budget(problem, 0), settings)
    least = refusal.value.shortfall_bytes
    enough = with_budget(problem, least)
    check(enough, solve(enough, settings))
    with pytest.raises(PlacementError, match="the step needs at least") as refusal:
        solve(with_budget(problem, least - 1), settings)
    assert refusal.value.shortfall_bytes == 1


@given(training_steps(), machines())
@examples(10)
def test_the_least_is_the_same_on_every_machine(dataflow: Dataflow, machine: Machine) -> None:
    budgets = dict.fromkeys(MEMORIES, PLENTY)
    every = (machine, *map(find, PRESETS))
    assert len({least_of(formulate(dataflow, each, budgets)).nbytes for each in every}) == 1


@given(problems(), st.data())
@examples(20)
def test_whatever_is_decided_needs_no_less(problem: Problem, data: st.DataObject) -> None:
    """Any strategies of any clusters, of all that can be decided op by op."""
    space = decision_space(problem, None, everything=True)
    chosen = Decisions(
        tuple(data.draw(st.sampled_from(d.strategies)) for d in space.params),
        tuple(data.draw(st.sampled_from(d.strategies)) for d in space.activations),
    )
    moves = moves_of(problem, space.placement("drawn", chosen))
    assert least_of(problem).nbytes <= shortfall_bytes(with_budget(problem, 0), moves)
