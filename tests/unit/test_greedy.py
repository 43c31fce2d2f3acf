"""Greedy: what costs least per byte leaves first, and no more than has to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.check import check
from cotrain_compile.placement.choices import Choices, Decisions
from cotrain_compile.placement.find_choices import choices_of
from cotrain_compile.placement.greedy import greedy, least_memory
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule import draft
from cotrain_compile.placement.solve import SolveSettings, solve
from cotrain_compile.plan import UpdateMode
from tests.examples import examples
from tests.unit.dataflows import mixed_precision_step
from tests.unit.nets import KIB, STEPS
from tests.unit.random_problems import (
    PLENTY,
    least_bytes,
    problems,
    resident_bytes,
    with_budget,
)
from tests.unit.test_regimes import FAST_LINK_SLOW_HOST, machine

FAST_DEVICE_FAST_HOST = machine(1e10, 1000e9, 1e9, 1000e9)
BUDGETS = {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}


def needed(choices: Choices, decisions: Decisions) -> int:
    """The least device bytes under which the decisions can be scheduled."""
    problem = with_budget(choices.problem, 0)
    try:
        draft(problem, choices.placement("drawn", decisions.ways, decisions.away))
    except PlacementError as refusal:
        return refusal.shortfall_bytes
    return 0


def test_what_fits_stays() -> None:
    problem = formulate(STEPS["perceptron"](3, KIB, KIB), FAST_LINK_SLOW_HOST, BUDGETS)
    decisions = greedy(choices_of(problem), PLENTY)
    assert {way.mode for way in decisions.ways} == {UpdateMode.RESIDENT}
    assert not any(decisions.away)


@pytest.mark.parametrize(
    ("on", "mode"),
    [(FAST_DEVICE_FAST_HOST, UpdateMode.HOST_STREAMED), (FAST_LINK_SLOW_HOST, UpdateMode.STREAMED)],
)
def test_states_leave_by_the_cheapest_way(on: Machine, mode: UpdateMode) -> None:
    """With too little room for the states of all layers, some go where their update costs least."""
    choices = choices_of(formulate(mixed_precision_step(4, params=100_000), on, BUDGETS))
    everything = 12 * 4 * 100_000 + 2 * 100_000
    first = greedy(choices, everything - 400_000)
    assert {way.mode for way in first.ways} == {UpdateMode.RESIDENT, mode}


def test_states_leave_before_activations() -> None:
    """A byte of states crosses while a byte of an activation has to go and to come."""
    step = STEPS["perceptron"](6, 1000 * KIB, 4000)
    choices = choices_of(formulate(step, FAST_LINK_SLOW_HOST, BUDGETS))
    peak = resident_bytes(choices.problem)
    little, more = greedy(choices, peak - 20_000), greedy(choices, peak - 1000 * KIB)
    assert {way.mode for way in little.ways} == {UpdateMode.RESIDENT, UpdateMode.STREAMED}
    assert not any(little.away)
    assert {way.mode for way in more.ways} == {UpdateMode.STREAMED}
    assert sum(more.away) == 1


@given(problems(), st.floats(0, 1), st.floats(0, 1))
@examples(50)
def test_no_decision_takes_the_host_beyond_its_share(
    problem: Problem, device_share: float, host_share: float
) -> None:
    choices = choices_of(problem)
    everything = on_host(choices, least_memory(choices))
    bytes_left = host_share * everything
    decisions = greedy(choices, device_share * resident_bytes(problem), bytes_left)
    assert on_host(choices, decisions) <= bytes_left


def on_host(choices: Choices, decisions: Decisions) -> int:
    """Bytes that leave the device under `decisions`, as if all at once."""
    weights = zip(choices.weights, decisions.ways, strict=True)
    away = zip(choices.activations, decisions.away, strict=True)
    return sum(b.host_bytes(way) for b, way in weights) + sum(b.nbytes * x for b, x in away)


@given(problems())
@examples(50)
def test_no_decision_needs_less_than_the_most_frugal_ones(problem: Problem) -> None:
    cuts = [choices_of(problem), choices_of(problem, at_peaks=True)]
    frugal = [needed(choices, least_memory(choices)) for choices in cuts]
    assert min(frugal) == least_bytes(problem)
    for choices, least in zip(cuts, frugal, strict=True):
        for target in (0, problem.budgets[Tier.DEVICE], PLENTY):
            assert needed(choices, greedy(choices, target)) >= least


@given(problems())
@examples(20)
def test_greedy_finds_a_plan_wherever_there_is_one(problem: Problem) -> None:
    plan = solve(problem, SolveSettings("greedy"))
    check(problem, plan)
    assert plan.placement.policy == "greedy"
