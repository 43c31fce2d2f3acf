"""Greedy: what costs least per byte leaves first, and no more than has to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.activation_strategies import Offloaded
from cotrain_compile.placement.decisions.decisions import C, Decision, Decisions, DecisionSpace, S
from cotrain_compile.placement.decisions.effects import Effect
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import draft
from cotrain_compile.placement.search.greedy import greedy, least_memory
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import UpdateMode
from tests.support.dataflows import mixed_precision_step
from tests.support.examples import examples
from tests.support.nets import KIB, STEPS
from tests.support.random_problems import (
    PLENTY,
    least_bytes,
    problems,
    resident_bytes,
    with_budget,
)
from tests.unit.placement.test_regimes import FAST_LINK_SLOW_HOST, machine

FAST_DEVICE_FAST_HOST = machine(1e10, 1000e9, 1e9, 1000e9)
BUDGETS = {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}


def needed(space: DecisionSpace, decisions: Decisions) -> int:
    """The least device bytes under which the decisions can be scheduled."""
    problem = with_budget(space.problem, 0)
    try:
        draft(problem, space.placement("drawn", decisions))
    except PlacementError as refusal:
        return refusal.shortfall_bytes
    return 0


def test_what_fits_stays() -> None:
    problem = formulate(STEPS["perceptron"](3, KIB, KIB), FAST_LINK_SLOW_HOST, BUDGETS)
    decisions = greedy(decision_space(problem), PLENTY)
    assert {strategy.mode for strategy in decisions.params} == {UpdateMode.RESIDENT}
    assert not offloaded(decisions)


@pytest.mark.parametrize(
    ("on", "mode"),
    [(FAST_DEVICE_FAST_HOST, UpdateMode.HOST_STREAMED), (FAST_LINK_SLOW_HOST, UpdateMode.STREAMED)],
)
def test_states_leave_by_the_cheapest_way(on: Machine, mode: UpdateMode) -> None:
    """With too little room for the states of all layers, some go where their update costs least."""
    space = decision_space(formulate(mixed_precision_step(4, params=100_000), on, BUDGETS))
    everything = 12 * 4 * 100_000 + 2 * 100_000
    first = greedy(space, everything - 400_000)
    assert {strategy.mode for strategy in first.params} == {UpdateMode.RESIDENT, mode}


def test_states_leave_before_activations() -> None:
    """A byte of states crosses while a byte of an activation has to go and to come."""
    step = STEPS["perceptron"](6, 1000 * KIB, 4000)
    space = decision_space(formulate(step, FAST_LINK_SLOW_HOST, BUDGETS))
    peak = resident_bytes(space.problem)
    little, more = greedy(space, peak - 20_000), greedy(space, peak - 1000 * KIB)
    assert {strategy.mode for strategy in little.params} == {
        UpdateMode.RESIDENT,
        UpdateMode.STREAMED,
    }
    assert not offloaded(little)
    assert {strategy.mode for strategy in more.params} == {UpdateMode.STREAMED}
    assert offloaded(more) == 1


@given(problems(), st.floats(0, 1), st.floats(0, 1))
@examples(50)
def test_no_decision_takes_the_host_beyond_its_share(
    problem: Problem, device_share: float, host_share: float
) -> None:
    space = decision_space(problem)
    everything = on_host(space, least_memory(space))
    bytes_left = host_share * everything
    decisions = greedy(space, device_share * resident_bytes(problem), bytes_left)
    assert on_host(space, decisions) <= bytes_left


def on_host(space: DecisionSpace, decisions: Decisions) -> int:
    """Bytes that leave the device under `decisions`, as if all at once."""
    chosen = [
        *map(_effect, space.activations, decisions.activations),
        *map(_effect, space.params, decisions.params),
    ]
    return sum(effect.host_bytes for effect in chosen)


def _effect(decision: Decision[C, S], strategy: S) -> Effect:
    return decision.effects[decision.strategies.index(strategy)]


def offloaded(decisions: Decisions) -> int:
    """How many clusters of activations leave."""
    return sum(isinstance(strategy, Offloaded) for strategy in decisions.activations)


@given(problems())
@examples(50)
def test_no_decision_needs_less_than_the_most_frugal_ones(problem: Problem) -> None:
    cuts = [decision_space(problem), decision_space(problem, at_peaks=True)]
    frugal = [needed(space, least_memory(space)) for space in cuts]
    assert min(frugal) == least_bytes(problem)
    for space, least in zip(cuts, frugal, strict=True):
        for target in (0, problem.budgets[Tier.DEVICE], PLENTY):
            assert needed(space, greedy(space, target)) >= least


@given(problems())
@examples(20)
def test_greedy_finds_a_plan_wherever_there_is_one(problem: Problem) -> None:
    plan = solve(problem, SolveSettings("greedy"))
    check(problem, plan)
    assert plan.placement.policy == "greedy"
