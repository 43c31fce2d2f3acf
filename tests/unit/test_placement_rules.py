"""Every plan that a rule makes passes `check`; a plan that is broken anywhere does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check import check
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.predict import predict_steady_state
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule import schedule
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer
from cotrain_compile.presets import find
from tests.unit.dataflows import chain, mixed_precision_step, random_dataflows

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
    periodic = predict_steady_state(problem, plan.placement, plan.tasks, steps=4)
    assert periodic.first_s == pytest.approx(plan.predicted.makespan_s)
    assert periodic.period_s == pytest.approx(plan.predicted.makespan_s)


def test_a_host_budget_that_is_too_small_says_what_is_missing() -> None:
    problem = problem_of(chain(3), host_bytes=1000)
    with pytest.raises(PlacementError, match=r"on the host .*raise host_memory_budget") as refusal:
        plan_of(problem)
    enough = problem_of(chain(3), host_bytes=1000 + refusal.value.shortfall_bytes)
    check(enough, plan_of(enough))


def test_a_refusal_says_what_is_where_when_memory_runs_out() -> None:
    with pytest.raises(PlacementError, match=r"needs .*at test\.backward: .*param .*state"):
        plan_of(problem_of(chain(3), device_bytes=1000), "resident")


# Ways to break a plan. The step is a chain of three layers that reads a weight once more in its
# backward, and once after the update. The budget is the smallest that fits.


def chain_that_reads_a_weight_late() -> Dataflow:
    step = chain(3, batch=1)
    first_update = step.position["update_0"]
    reread = Op("reread", "test.reread", Phase.BACKWARD, ("w1",), ("r",), 10, 10)
    norm = Op("norm", "test.norm", Phase.OPTIMIZER, ("w1", "r"), ("n",), 10, 10)
    outputs = [Buffer(name, 4, Role.TEMPORARY, is_output=True) for name in ("r", "n")]
    ops = (*step.ops[:first_update], reread, *step.ops[first_update:], norm)
    return replace(step, ops=ops, buffers=(*step.buffers, *outputs), fingerprint="late")


STEP = chain_that_reads_a_weight_late()


def with_task(plan: Plan, name: str, **changes: object) -> Plan:
    """`plan` with some fields of one task changed."""
    changed = tuple(
        replace(task, **changes) if task.name == name else task  # type: ignore[arg-type]
        for task in plan.tasks
    )
    return replace(plan, tasks=changed)


def without_tasks(plan: Plan, gone: Callable[[Task], bool]) -> Plan:
    return replace(plan, tasks=tuple(task for task in plan.tasks if not gone(task)))


def with_home(plan: Plan, buffer: str, tier: Tier) -> Plan:
    homes = {**plan.placement.homes, buffer: tier}
    return replace(plan, placement=replace(plan.placement, homes=homes))


BROKEN: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "another step": (lambda p: replace(p, fingerprint="other"), "was made for step other"),
    "a state at home on the device": (
        lambda p: with_home(p, "m0", Tier.DEVICE),
        "m0 is not at home on the host",
    ),
    "a weight at home on the host": (
        lambda p: with_home(p, "w0", Tier.HOST),
        "w0",
    ),
    "a home too few": (
        lambda p: replace(p, placement=replace(p.placement, homes={})),
        "every persistent buffer needs one home",
    ),
    "an update too few": (
        lambda p: replace(p, placement=replace(p.placement, updates={})),
        "every parameter needs one update mode",
    ),
    "a missing region": (
        lambda p: without_tasks(p, lambda t: isinstance(t, HostRegion) and t.param == "w1"),
        "host regions and host updates do not match",
    ),
    "a gradient that is not sent": (
        lambda p: without_tasks(p, lambda t: t.name == "offload.g0"),
        "the update of w0 does not wait for its inputs",
    ),
    "a weight that does not come back": (
        lambda p: without_tasks(p, lambda t: t.name == "prefetch.w2"),
        "the new w2 is not moved back once",
    ),
    "a weight that comes back before its update": (
        lambda p: with_task(p, "prefetch.w2", after=("offload.w2",)),
        "w2 is moved back before its update",
    ),
    "an update that does not wait for its gradient": (
        lambda p: with_task(p, "update.w0", after=("offload.w0",)),
        "does not wait for its inputs",
    ),
    "too few bytes": (
        lambda p: with_task(p, "offload.g1", nbytes=7),
        "offload.g1 moves 7 bytes of",
    ),
    "a gradient sent before it is there": (
        lambda p: with_task(p, "offload.g0", issue_after="loss"),
        "nothing there to copy yet",
    ),
    "a wait that comes too late for the budget": (
        lambda p: with_task(p, "offload.g2", wait_before=None),
        "bytes on the device at",
    ),
    "a wait before the issue": (
        lambda p: with_task(p, "offload.g0", wait_before="forward_1"),
        "offload.g0 is waited for before its issue",
    ),
    "a wait at an op that is not there": (
        lambda p: with_task(p, "offload.g0", wait_before="nowhere"),
        "never waited for: ['offload.g0']",
    ),
    "an issue at an op that is not there": (
        lambda p: with_task(p, "offload.w0", issue_after="nowhere"),
        "offload.w0",
    ),
    "a new weight read before it is back": (
        lambda p: with_task(p, "prefetch.w1", wait_before=None),
        "norm touches w1 on the wrong side of its update",
    ),
    "an old weight overwritten while it is read": (
        lambda p: with_task(
            with_task(p, "update.w1", issue_after="backward_1"),
            "prefetch.w1",
            issue_after="backward_1",
            wait_before="reread",
        ),
        "reread touches w1 on the wrong side of its update",
    ),
    "two tasks of one name": (
        lambda p: replace(p, tasks=(*p.tasks, p.tasks[0])),
        "two tasks share a name",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plan_is_refused(how: str) -> None:
    breaking, says = BROKEN[how]
    problem = problem_of(STEP, device_bytes=least_bytes(STEP, "zero-offload"))
    plan = plan_of(problem)
    check(problem, plan)
    with pytest.raises(PlanError) as refusal:
        check(problem, breaking(plan))
    assert says in str(refusal.value)


@given(steps(), st.data())
def test_no_single_task_can_be_left_out(step: Dataflow, data: st.DataObject) -> None:
    problem = problem_of(step)
    plan = plan_of(problem)
    gone = data.draw(st.sampled_from(plan.tasks))
    with pytest.raises(PlanError):
        check(problem, without_tasks(plan, lambda task: task is gone))


@given(steps(), st.data())
def test_no_transfer_can_move_other_bytes(step: Dataflow, data: st.DataObject) -> None:
    problem = problem_of(step)
    plan = plan_of(problem)
    transfer: Transfer = data.draw(st.sampled_from(plan.transfers))
    wrong = data.draw(st.integers(0, 1 << 40).filter(lambda n: n != transfer.nbytes))
    with pytest.raises(PlanError, match="moves"):
        check(problem, with_task(plan, transfer.name, nbytes=wrong))
