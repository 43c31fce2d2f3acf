"""Explaining a parameter: each alternative is that placement, scheduled and simulated again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.strategies import Strategy
from cotrain_compile.placement.explain.explain import (
    alternatives,
    current,
    explain,
    strategies_for,
    strategy_in,
    with_strategy,
)
from cotrain_compile.placement.explain.sensitivity import limits, slacks
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.attempts import TACTICS
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Lane, Placement, Plan, UpdateMode
from cotrain_compile.presets import find
from tests.support.dataflows import chain
from tests.support.examples import examples
from tests.support.random_problems import PLENTY, fits, problems, with_budget

KIB = 1024
# Matrices of 256 KiB, so that moving one takes longer than starting a copy.
STEP = chain(3, width=256)
PROBLEM = formulate(STEP, find("rtx4090"), {Tier.DEVICE: 1500 * KIB, Tier.HOST: PLENTY})


def plan_of(problem: Problem, policy: str = "coarse") -> Plan:
    return solve(problem, SolveSettings(policy))


def fastest_s(problem: Problem, placement: Placement) -> float:
    """Seconds of a step with `placement`, through the whole of schedule and predict."""
    plans = [schedule(problem, placement, tactics=tactics) for tactics in TACTICS]
    return min(predict(place_plan(problem, plan)).makespan_s for plan in plans)


def test_keeping_one_parameter_on_the_device_costs_what_that_plan_takes() -> None:
    """The placement is written by hand: w1 with its momentum stays, the others are as in coarse."""
    problem = with_budget(PROBLEM, PLENTY)
    plan = plan_of(problem)
    base = plan.placement
    by_hand = replace(
        base,
        homes={**base.homes, "m1": Tier.DEVICE},
        updates={**base.updates, "w1": UpdateMode.RESIDENT},
    )
    found = {a.strategy: a for a in alternatives(problem, plan, "w1")}
    assert found[Strategy(UpdateMode.RESIDENT, 0)].step_s == pytest.approx(
        fastest_s(problem, by_hand)
    )
    assert by_hand.updates["w0"] is UpdateMode.HOST


@given(problems(most=2), st.data())
@examples(25)
def test_every_alternative_costs_what_an_independent_simulation_says(
    problem: Problem, data: st.DataObject
) -> None:
    assume(not fits(problem, problem.budgets[Tier.DEVICE]))
    plan = plan_of(problem, "greedy")
    assume(plan.placement.updates)
    param = data.draw(st.sampled_from(sorted(plan.placement.updates)))
    for alternative in alternatives(problem, plan, param):
        placement = with_strategy(problem, plan.placement, param, alternative.strategy)
        assert strategy_in(problem, placement, param) == alternative.strategy
        if alternative.step_s is None:
            assert alternative.shortfall_bytes > 0
            with pytest.raises(PlacementError):
                schedule(problem, placement)
        else:
            assert alternative.step_s == pytest.approx(fastest_s(problem, placement), rel=1e-9)
            assert alternative.peak_bytes is not None
            assert alternative.peak_bytes <= problem.budgets[Tier.DEVICE]


@given(problems(most=2), st.data())
@examples(40)
def test_changing_one_parameter_changes_nothing_else(problem: Problem, data: st.DataObject) -> None:
    dataflow = problem.dataflow
    plan = plan_of(with_budget(problem, PLENTY), "resident")
    assume(dataflow.updates)
    param = data.draw(st.sampled_from(sorted(dataflow.update)))
    way = data.draw(st.sampled_from(strategies_for(problem, param)))
    changed = with_strategy(problem, plan.placement, param, way)
    own = {param, *dataflow.update[param].states}
    assert strategy_in(problem, changed, param) == way
    assert {n for n, t in changed.homes.items() if t is not plan.placement.homes[n]} <= own
    assert changed.updates == {**plan.placement.updates, param: way.mode}
    assert (
        with_strategy(problem, changed, param, Strategy(UpdateMode.RESIDENT, 0)) == plan.placement
    )


def least_bytes_of_coarse() -> int:
    """The smallest budget that the rule can be scheduled in."""
    with pytest.raises(PlacementError) as refusal:
        plan_of(with_budget(PROBLEM, 1))
    return 1 + refusal.value.shortfall_bytes


def test_the_plan_itself_is_the_first_row() -> None:
    plan = plan_of(PROBLEM)
    now = current(PROBLEM, plan, "w1")
    assert now.strategy == Strategy(UpdateMode.HOST, 0)
    assert now.step_s == pytest.approx(plan.predicted.makespan_s)
    assert now.peak_bytes == plan.predicted.peak_bytes[Tier.DEVICE]
    assert now.traffic_bytes == plan.bytes_moved("offload") + plan.bytes_moved("prefetch")


def test_what_does_not_fit_says_how_many_bytes_are_missing() -> None:
    """On the least budget of coarse no momentum can stay; with so many bytes more it can."""
    least, way = least_bytes_of_coarse(), Strategy(UpdateMode.RESIDENT, 0)
    tight = with_budget(PROBLEM, least)
    plan = plan_of(tight)
    said = explain(tight, plan, "w2")
    (missing,) = (a.shortfall_bytes for a in said.alternatives if a.strategy == way)
    assert f"does not fit: {missing / KIB:.1f} KiB ({missing:,} bytes) missing" in str(said)
    placement = with_strategy(tight, plan.placement, "w2", way)
    schedule(with_budget(PROBLEM, least + missing), placement)
    with pytest.raises(PlacementError):
        schedule(tight, placement)


def test_an_explanation_says_where_and_why() -> None:
    said = explain(PROBLEM, plan_of(PROBLEM), "w1")
    assert said.reuse_distance_s is not None
    text = str(said)
    assert "parameter   w1: 256.0 KiB, with 256.0 KiB of optimizer states" in text
    assert "kept        updated on the host; the weight is at home on the device" in text
    assert "as planned" in text
    assert "  on the device" in text


def test_an_unknown_parameter_names_its_neighbours() -> None:
    with pytest.raises(PlanError, match="no parameter 'w_1'; near are w1"):
        explain(PROBLEM, plan_of(PROBLEM), "w_1")


def test_a_parameter_without_an_update_group_stays_and_is_explained() -> None:
    """Such as one of two in one storage; it is written, so that it is no frozen one either."""
    without = replace(STEP, updates=tuple(g for g in STEP.updates if g.param != "w1"))
    problem = with_budget(replace(PROBLEM, dataflow=without), PLENTY)
    said = explain(problem, plan_of(problem), "w1")
    assert (said.current.strategy.mode, said.current.strategy.fetches) == (None, 0)
    assert said.alternatives == ()


def test_what_limits_a_step_is_what_makes_it_faster() -> None:
    """With all on the device the step is the device's work; behind a slow link it is the link."""
    free = with_budget(PROBLEM, PLENTY)
    found = limits(free, plan_of(free, "resident"))
    assert found.shares[Lane.DEVICE] == pytest.approx(1.0)
    assert found.first == Lane.DEVICE
    assert found.full == ()
    slow = PROBLEM.machine.but(h2d=replace(PROBLEM.machine.h2d, bytes_per_s=1e7))
    behind = replace(PROBLEM, machine=slow)
    assert limits(behind, plan_of(behind)).first == Lane.H2D


def test_memory_limits_where_its_budget_is_reached() -> None:
    tight = with_budget(PROBLEM, least_bytes_of_coarse())
    assert limits(tight, plan_of(tight)).full == (Tier.DEVICE,)


def test_slack_is_the_time_from_a_copy_to_its_wait() -> None:
    """The last thing of the step is a copy of w0, whose gradient comes last."""
    plan = plan_of(PROBLEM)
    found = slacks(STEP, plan)
    last = max(plan.predicted.spans, key=lambda span: span.end_s)
    task = next(t for t in plan.transfers if t.name == last.name)
    assert found[task.buffer] == 0.0
    assert set(found) == {"w0", "w1", "w2"}
    assert all(seconds >= 0 for seconds in found.values())


def test_the_peak_of_an_alternative_is_that_of_its_placement() -> None:
    problem = with_budget(PROBLEM, PLENTY)
    plan = plan_of(problem)
    way = Strategy(UpdateMode.RESIDENT, 0)
    again = schedule(problem, with_strategy(problem, plan.placement, "w0", way))
    found = {a.strategy: a.peak_bytes for a in alternatives(problem, plan, "w0")}
    assert found[way] == max(place_plan(problem, again).device_bytes)
