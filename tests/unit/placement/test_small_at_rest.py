"""Small tensors stay on the device: a copy of a few bytes takes a latency, and frees nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.policies import rule, smallest, streamed
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import Draft, schedule
from cotrain_compile.placement.search import solve as searching
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.improve import let_small_leave
from cotrain_compile.placement.search.small_params import (
    SHARE,
    SMALL_BYTES,
    as_in,
    at_rest,
    with_small_at_rest,
    with_small_resting,
)
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Placement, Plan, UpdateMode
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.examples import examples
from tests.support.written_out import written_out

PLENTY = 1 << 62
LAYERS = 4
SMALL = ("w1", "w3")  # and their states and gradients, in every other layer


def with_small_layers(dataflow: Dataflow) -> Dataflow:
    """`dataflow` in which what every other parameter has is a thousandth."""
    small = {f"{kind}{i}" for kind in ("w", "m", "g", "p32_", "m_", "v_") for i in (1, 3)}
    buffers = (
        replace(b, nbytes=max(4, b.nbytes // 1000)) if b.name in small else b
        for b in dataflow.buffers
    )
    return replace(dataflow, buffers=tuple(buffers))


def problem_of(dataflow: Dataflow, device_bytes: int = PLENTY) -> Problem:
    budgets = {Tier.DEVICE: device_bytes, Tier.HOST: PLENTY}
    return formulate(dataflow, find("h100"), budgets)


def small_tasks(plan: Plan) -> list[str]:
    return [task.name for task in plan.transfers if task.buffer[1:] in ("1", "3")]


def test_the_smallest_together_have_next_to_nothing() -> None:
    """Of equals all or none: which of them comes first says nothing."""
    sizes = {"matrix": 10_000, "bias": 40, "norm": 40, "scale": 40, "step": 4}
    assert smallest(sizes) == {"step"}
    assert smallest({**sizes, "matrix": 20_000}) == {"step", "bias", "norm", "scale"}
    assert smallest({"a": 8, "b": 8}) == frozenset()
    assert smallest({}) == frozenset()


def test_small_states_are_not_streamed() -> None:
    step = with_small_layers(chain(LAYERS, width=1024))
    placement = streamed(step)
    assert {m for m, tier in placement.homes.items() if tier is Tier.HOST} == {"m0", "m2"}
    assert placement.updates["w1"] is UpdateMode.RESIDENT
    assert placement.updates["w0"] is UpdateMode.STREAMED


def test_what_auto_moves_is_not_small_where_there_is_room() -> None:
    """A fraction by bytes, or a rounding, takes small ones along; the plan does not."""
    step = with_small_layers(chain(LAYERS, width=1024, batch=4096))
    free = problem_of(step)
    peak = schedule(free, rule("resident")(step)).predicted.peak_bytes[Tier.DEVICE]
    plan = solve(problem_of(step, int(0.8 * peak)), SolveSettings(policy="auto"))
    assert plan.tasks
    assert not small_tasks(plan)
    assert small_tasks(schedule(free, rule("zero-offload")(step)))


@examples(12)
@given(
    st.sampled_from(["zero-offload", "coarse", "fraction:0.5"]),
    st.booleans(),
    st.floats(0.3, 1.5),
)
def test_plans_in_which_small_ones_rest_are_sound(policy: str, mixed: bool, share: float) -> None:
    whole = mixed_precision_step(LAYERS, params=50_000) if mixed else chain(LAYERS, width=512)
    step = with_small_layers(whole)
    free = problem_of(step)
    placement = rule(policy)(step)
    peak = schedule(free, placement).predicted.peak_bytes[Tier.DEVICE]
    problem = free.with_budget(Tier.DEVICE, int(share * peak))
    calmer = list(with_small_at_rest(step, placement))
    assert calmer
    for fewer in calmer:
        moving = [p for p, mode in fewer.updates.items() if mode is not UpdateMode.RESIDENT]
        assert len(moving) < sum(m is not UpdateMode.RESIDENT for m in placement.updates.values())
        try:
            check(problem, schedule(problem, fewer))
        except PlacementError:
            assert share < 1.1  # what rests is a thousandth of what moves
    assert not list(with_small_at_rest(step, calmer[0]))


def biased(width: int, machine: str = "h100") -> Problem:
    """A step of which every other parameter is small, in a quarter of what all takes."""
    step = with_small_layers(chain(LAYERS, width=width, batch=4 * width))
    peak = schedule(problem_of(step), rule("resident")(step)).predicted.peak_bytes[Tier.DEVICE]
    return formulate(step, find(machine), {Tier.DEVICE: peak // 4, Tier.HOST: PLENTY})


def test_small_parameters_are_not_decided_about() -> None:
    problem = with_small_resting(biased(1024))
    assert problem.resting == set(SMALL)
    for decision in decision_space(problem).params:
        modes = {option.strategy.mode for option in decision.options}
        if not problem.resting.isdisjoint(decision.cluster.params):
            assert problem.resting.issuperset(decision.cluster.params)
            assert modes == {UpdateMode.RESIDENT}
        else:
            assert len(modes) > 1


def test_what_rests_takes_next_to_nothing_of_the_budget() -> None:
    problem = biased(1024)
    sizes = [_bytes_of(problem.dataflow, param) for param in SMALL]
    assert sizes[0] == sizes[1] < SMALL_BYTES
    for count in (0, 1, 2):
        tight = problem.with_budget(Tier.DEVICE, int((count + 0.5) * sizes[0] / SHARE))
        assert len(with_small_resting(tight).resting) == count


def _bytes_of(dataflow: Dataflow, param: str) -> int:
    group = dataflow.update[param]
    names = (group.param, *group.states, group.gradient)
    return sum(dataflow.buffer[name].nbytes for name in names)


def test_one_rests_whose_update_takes_no_longer_than_its_copies() -> None:
    problem = biased(1024)
    slow = dict.fromkeys(problem.dataflow.update["w1"].ops, 1.0)
    costs = replace(problem.costs, device_s={**problem.costs.device_s, **slow})
    assert with_small_resting(replace(problem, costs=costs)).resting == {"w3"}


def test_what_rests_and_leaves_again_is_as_before() -> None:
    step = with_small_layers(mixed_precision_step(LAYERS, params=50_000))
    placement = rule("zero-offload")(step)
    groups = [group for group in step.updates if group.param in ("p32_1", "p32_3")]
    resting = at_rest(placement, groups)
    assert {resting.updates[group.param] for group in groups} == {UpdateMode.RESIDENT}
    again = as_in(resting, placement, groups)
    assert replace(again, offloaded=()) == replace(placement, offloaded=())
    assert set(again.offloaded) == set(placement.offloaded)


def test_what_rests_is_tried_away_and_that_is_kept_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the plan that needs least; it may be faster."""
    problem = biased(1024)
    problem = with_small_resting(problem.with_budget(Tier.DEVICE, PLENTY))
    attempts = Attempts(problem, SolveSettings(), lambda stage: None)
    attempts.covers = True
    assert attempts.attempt(attempts.step, "streamed")
    resting = attempts.found.fastest
    assert resting is not None
    tried: list[Placement] = []

    def drafted(self: Attempts, problem: Problem, placement: Placement, *_: object) -> Draft:
        tried.append(placement)
        return replace(resting, placement=placement, step_s=factor * resting.step_s)

    monkeypatch.setattr(Attempts, "drafted", drafted)
    for factor in (1.1, 0.9):
        let_small_leave(attempts)
        found = attempts.found.fastest
        assert found is not None
        assert (found.placement is tried[-1]) is (factor < 1.0)
    for placement in tried:
        assert {placement.updates[param] for param in SMALL} == {UpdateMode.HOST_STREAMED}


def test_what_fits_in_no_form_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small ones at rest; then what needs least says that no other form fits."""
    step = written_out(biased(1024).dataflow)
    problem = problem_of(step)
    with pytest.raises(PlacementError) as refusal:
        solve(problem.with_budget(Tier.DEVICE, 1))
    least = 1 + refusal.value.shortfall_bytes
    searched: list[bool] = []
    run = searching._Search.run

    def noting(self: searching._Search, incumbents: Sequence[Plan]) -> Plan:
        searched.append(bool(self.problem.resting))
        return run(self, incumbents)

    monkeypatch.setattr(searching._Search, "run", noting)
    with pytest.raises(PlacementError) as again:
        solve(problem.with_budget(Tier.DEVICE, least - 1))
    assert again.value.shortfall_bytes == 1
    assert searched == [True]
    searched.clear()
    assert solve(problem.with_budget(Tier.DEVICE, least)).tasks
    assert searched[0]
