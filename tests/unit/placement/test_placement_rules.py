"""Every plan that a rule makes passes `check`, under any budget that it fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import resident, rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.simulate.predict import predict_steady_state
from cotrain_compile.plan import Placement, Plan, Transfer, UpdateMode
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step, random_dataflows
from tests.support.plans.broken_plans import with_task, without

POLICIES = ("resident", "zero-offload", "coarse", "fraction:0.5")
PLENTY = 1 << 62


def problem_of(dataflow: Dataflow, device_bytes: int = PLENTY, host_bytes: int = PLENTY) -> Problem:
    budgets = {Tier.DEVICE: device_bytes, Tier.HOST: host_bytes}
    return formulate(dataflow, find("h100"), budgets)


def plan_of(problem: Problem, policy: str = "zero-offload") -> Plan:
    return schedule(problem, rule(policy)(problem.dataflow))


def least_bytes(dataflow: Dataflow, policy: str) -> int:
    """The smallest device budget of `policy`, by what a refusal says is missing."""
    try:
        plan_of(problem_of(dataflow, device_bytes=0), policy)
    except PlacementError as refusal:
        return refusal.shortfall_bytes
    return 0


@st.composite
def steps(draw: st.DrawFn) -> Dataflow:
    """A training step with update groups, its updates in any order, and new weights read at last.

    Some read a weight after its update, as a step does that returns a norm of the new weights.
    """
    layers = draw(st.integers(1, 5))
    if draw(st.booleans()):
        step = chain(layers, width=draw(st.integers(1, 64)), batch=draw(st.integers(1, 64)))
    else:
        params = draw(st.integers(1, 2000))
        step = mixed_precision_step(layers, params=params, batch_bytes=draw(st.integers(1, 9999)))
    device = [op for op in step.ops if op.phase is not Phase.OPTIMIZER]
    updates = draw(st.permutations([group.ops for group in step.updates]))
    by_name = {op.name: op for op in step.ops}
    optimizer = [by_name[name] for group in updates for name in group]
    read_late = draw(st.lists(st.sampled_from([g.param for g in step.updates]), unique=True))
    late = [
        Op(f"norm_{param}", "test.norm", Phase.OPTIMIZER, (param,), (f"n_{param}",), 10, 10)
        for param in read_late
    ]
    norms = [Buffer(f"n_{param}", 4, Role.TEMPORARY, is_output=True) for param in read_late]
    return replace(
        step, ops=(*device, *optimizer, *late), buffers=(*step.buffers, *norms), fingerprint="drawn"
    )


@given(steps(), st.sampled_from(POLICIES), st.floats(0, 1))
def test_plans_of_the_rules_are_sound_under_any_budget_that_fits(
    step: Dataflow, policy: str, slack: float
) -> None:
    least = least_bytes(step, policy)
    everything = sum(buffer.nbytes for buffer in step.buffers)
    problem = problem_of(step, device_bytes=least + int(slack * everything))
    plan = plan_of(problem, policy)
    check(problem, plan)
    assert plan.predicted.peak_bytes[Tier.DEVICE] <= problem.budgets[Tier.DEVICE]


@st.composite
def placed_steps(draw: st.DrawFn) -> tuple[Dataflow, Placement]:
    """A step with any mode for any update, and whatever has a gap offloaded in it, or not."""
    step = draw(steps())
    start = resident(step)
    homes, updates = dict(start.homes), dict(start.updates)
    read_late = {name for op in step.ops if op.target == "test.norm" for name in op.reads}
    for group in step.updates:
        # A weight that is read after its update has to be back on the device by then.
        unfit = {UpdateMode.HOST_STREAMED} if group.param in read_late else set()
        mode = draw(st.sampled_from([mode for mode in UpdateMode if mode not in unfit]))
        updates[group.param] = mode
        if mode is not UpdateMode.RESIDENT:
            homes.update(dict.fromkeys(group.states, Tier.HOST))
        may_be_on_host = {UpdateMode.STREAMED: draw(st.booleans()), UpdateMode.HOST_STREAMED: True}
        if may_be_on_host.get(mode):
            homes[group.param] = Tier.HOST
    can_go = [name for name in with_a_gap(step, homes) if name not in read_late]
    offloaded = [name for name in can_go if draw(st.booleans())]
    early = draw(st.booleans())
    return step, Placement("drawn", homes, updates, tuple(offloaded), early)


def with_a_gap(step: Dataflow, homes: dict[str, Tier]) -> list[str]:
    """Activations and fetched weights that are not used all the time until the backward ends."""
    made_on_host = {
        group.low_precision for group in step.updates if homes[group.param] is Tier.HOST
    }
    ops = [op for op in step.ops if op.phase is not Phase.OPTIMIZER]
    ops = [op for op in ops if made_on_host.isdisjoint(op.writes)]
    found = []
    for buffer in step.buffers:
        used = [i for i, op in enumerate(ops) if buffer.name in (*op.reads, *op.writes)]
        is_free = homes.get(buffer.name) is Tier.HOST or not (buffer.is_input or buffer.is_output)
        if is_free and any(later > sooner + 1 for sooner, later in pairwise(used)):
            found.append(buffer.name)
    return found


@given(placed_steps(), st.floats(0, 1))
def test_plans_of_any_placement_are_sound_under_any_budget_that_fits(
    placed: tuple[Dataflow, Placement], slack: float
) -> None:
    step, placement = placed
    try:
        schedule(problem_of(step, device_bytes=0), placement)
        least = 0
    except PlacementError as refusal:
        least = refusal.shortfall_bytes
    everything = sum(buffer.nbytes for buffer in step.buffers)
    problem = problem_of(step, device_bytes=least + int(slack * everything))
    plan = schedule(problem, placement)
    check(problem, plan)
    peaks = replay(step, plan)
    assert peaks[Tier.DEVICE].nbytes == plan.predicted.peak_bytes[Tier.DEVICE]
    assert peaks[Tier.HOST].nbytes <= plan.predicted.peak_bytes[Tier.HOST]


@given(steps(), st.sampled_from(POLICIES))
def test_the_shortfall_is_exact(step: Dataflow, policy: str) -> None:
    least = least_bytes(step, policy)
    plan = plan_of(problem_of(step, device_bytes=least), policy)
    assert plan.predicted.peak_bytes[Tier.DEVICE] == least
    with pytest.raises(PlacementError, match="short") as refusal:
        plan_of(problem_of(step, device_bytes=least - 1), policy)
    assert refusal.value.shortfall_bytes == 1


@given(random_dataflows(), st.sampled_from(POLICIES))
def test_steps_without_updates_are_placed_too(step: Dataflow, policy: str) -> None:
    problem = problem_of(step)
    plan = plan_of(problem, policy)
    check(problem, plan)
    assert not plan.tasks


@given(steps())
def test_host_updates_keep_states_off_the_device(step: Dataflow) -> None:
    states = step.total_bytes(Role.OPTIMIZER_STATE)
    assert least_bytes(step, "zero-offload") <= least_bytes(step, "resident") - states


@given(steps(), st.sampled_from(POLICIES))
def test_a_step_that_is_complete_when_it_returns_repeats_at_its_own_length(
    step: Dataflow, policy: str
) -> None:
    problem = problem_of(step)
    plan = plan_of(problem, policy)
    periodic = predict_steady_state(place_plan(problem, plan), steps=4)
    assert periodic.first_s == pytest.approx(plan.predicted.makespan_s)
    assert periodic.period_s == pytest.approx(plan.predicted.makespan_s)


def test_a_host_budget_that_is_too_small_says_what_is_missing() -> None:
    problem = problem_of(chain(3), host_bytes=1000)
    with pytest.raises(PlacementError, match=r"on the host .*raise host_memory_budget") as refusal:
        plan_of(problem)
    enough = problem_of(chain(3), host_bytes=1000 + refusal.value.shortfall_bytes)
    assert refusal.value.tier is Tier.HOST
    check(enough, plan_of(enough))


def test_the_values_inside_an_update_on_the_host_are_there_to_their_last_use() -> None:
    """Of three values, each made of the one before, two are there at once."""
    step = chain(1)
    *others, update = step.ops
    weight = step.buffer["g0"]
    inside = ["g0", "scaled", "squared", "rooted"]
    ops = [
        replace(update, name=f"make_{made}", reads=(read,), writes=(made,))
        for read, made in pairwise(inside)
    ]
    last = replace(update, reads=("rooted", *update.reads[1:]))
    group = replace(step.updates[0], ops=tuple(op.name for op in (*ops, last)))
    step = replace(
        step,
        ops=(*others, *ops, last),
        buffers=(*step.buffers, *(replace(weight, name=name) for name in inside[1:])),
        updates=(group,),
    )
    plan, in_one = plan_of(problem_of(step)), plan_of(problem_of(chain(1)))
    more = plan.predicted.peak_bytes[Tier.HOST] - in_one.predicted.peak_bytes[Tier.HOST]
    assert more == 2 * weight.nbytes
    check(problem_of(step), plan)


def test_a_refusal_says_what_is_where_when_memory_runs_out() -> None:
    with pytest.raises(PlacementError, match=r"needs .*at test\.backward: .*param .*state"):
        plan_of(problem_of(chain(3), device_bytes=1000), "resident")


@given(steps(), st.data())
def test_no_single_task_can_be_left_out(step: Dataflow, data: st.DataObject) -> None:
    problem = problem_of(step)
    plan = plan_of(problem)
    gone = data.draw(st.sampled_from(plan.tasks))
    with pytest.raises(PlanError):
        check(problem, without(plan, gone.name))


@given(steps(), st.data())
def test_no_transfer_can_move_other_bytes(step: Dataflow, data: st.DataObject) -> None:
    problem = problem_of(step)
    plan = plan_of(problem)
    transfer: Transfer = data.draw(st.sampled_from(plan.transfers))
    wrong = data.draw(st.integers(0, 1 << 40).filter(lambda n: n != transfer.nbytes))
    with pytest.raises(PlanError, match="moves"):
        check(problem, with_task(plan, transfer.name, nbytes=wrong))


def test_zero_offload_moves_four_bytes_a_parameter() -> None:
    """Gradients down and low-precision copies up, two bytes each, as in table 1 of its paper."""
    step = mixed_precision_step(3, params=1000)
    plan = plan_of(problem_of(step, device_bytes=1 << 30), "zero-offload")
    assert plan.bytes_moved("offload") == plan.bytes_moved("prefetch") == 3 * 2 * 1000
    rest = [b for b in step.buffers if plan.placement.homes.get(b.name) is Tier.DEVICE]
    assert not rest


def test_zero_offload_keeps_a_weight_that_is_read_after_its_update() -> None:
    step = mixed_precision_step(2)
    late = Op("norm", "test.norm", Phase.OPTIMIZER, ("p32_1",), ("n",), 10, 10)
    step = replace(
        step,
        ops=(*step.ops, late),
        buffers=(*step.buffers, Buffer("n", 4, Role.TEMPORARY, is_output=True)),
    )
    problem = problem_of(step, device_bytes=1 << 30)
    plan = plan_of(problem, "zero-offload")
    check(problem, plan)
    assert plan.placement.homes["p32_0"] is Tier.HOST
    assert plan.placement.homes["p32_1"] is Tier.DEVICE
