"""Sound plans pass `check`, for every way to place something; a plan that is broken does not.

The budgets of every sound plan are exactly its peaks.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.copies import run_order
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.plan import MovedOps, Plan, Task, UpdateMode
from tests.support.dataflows import chain
from tests.support.plans.broken_orders import BROKEN_ORDERS
from tests.support.plans.broken_plans import (
    BROKEN_RULES,
    WEIGHT,
    with_home,
    with_mode,
    with_placement,
    with_plenty,
    with_task,
    without,
)
from tests.support.plans.sound_plans import SOUND, Sound, fetch, sound, store

BROKEN = {**BROKEN_RULES, **BROKEN_ORDERS}
ACTIVATION = 4 * 8 * 64  # bytes, of a chain


def one_byte_short(plan: Plan, tier: Tier) -> Plan:
    return replace(plan, budgets={**plan.budgets, tier: plan.budgets[tier] - 1})


def refuse(case: Sound, plan: Plan, says: str = "unsound plan") -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        check(case.problem, plan)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_plan_fits_its_peaks_and_nothing_less(name: str) -> None:
    case = SOUND[name]()
    check(case.problem, case.plan)
    for tier in MEMORIES:
        with pytest.raises(PlanError, match=rf"bytes on the {tier} .* 1 too many"):
            check(case.problem, one_byte_short(case.plan, tier))


@pytest.mark.parametrize(
    ("name", "device_bytes", "host_bytes"),
    [
        # backward_0: x, d0, loss, all weights, states and gradients
        ("nothing_moves", 2 * ACTIVATION + 4 + 9 * WEIGHT, 0),
        # backward_2: x, h0, h1, d1, d2, loss; w0-w2, m0-m2 and g2, which its update then frees
        ("updates_run_early", 5 * ACTIVATION + 4 + 7 * WEIGHT, 0),
        # before update_0: x, loss; w0-w2, m0, g0, g1 and the fetched m1
        ("streamed_states", ACTIVATION + 4 + 7 * WEIGHT, 2 * WEIGHT),
        # backward_0 again; the copy of h0 on the host for a while
        ("activation_offloaded", 2 * ACTIVATION + 4 + 9 * WEIGHT, ACTIVATION),
        # backward_2, with w2 fetched and m2 on the host; its home, and g2 while it is read
        ("host_streamed", 5 * ACTIVATION + 4 + 6 * WEIGHT, 3 * WEIGHT),
        # backward_1: lr, x, h0, h1, d0; all of layer 1, its gradient and the fetched p16_0. On the
        # host three homes, the cast or the gradient, and the gradient widened inside the update
        ("host_streamed_low_precision", 4 + 4 * 64 + 18_000, 12_000 + 2_000 + 4_000),
    ],
)
def test_peaks_are_those_counted_by_hand(name: str, device_bytes: int, host_bytes: int) -> None:
    case = SOUND[name]()
    peaks = {tier: peak.nbytes for tier, peak in replay(case.dataflow, case.plan).items()}
    assert peaks == {Tier.DEVICE: device_bytes, Tier.HOST: host_bytes}


def test_memory_that_an_offload_frees_is_there_for_a_fetch_before_the_same_op() -> None:
    """m2 goes and m1 comes before update_0, so there is never more than at backward_0."""
    case = SOUND["streamed_states"]()
    peak = replay(case.dataflow, with_task(case.plan, "store.m2", wait_before="update_0"))
    assert peak[Tier.DEVICE].nbytes == 2 * ACTIVATION + 4 + 7 * WEIGHT
    assert peak[Tier.DEVICE].where == "at backward_0"


def test_a_fetched_copy_takes_memory_from_its_issue() -> None:
    """With m1 there is as much at backward_0 as without it at update_0, and d0."""
    case = SOUND["streamed_states"]()
    sooner = with_task(case.plan, "fetch.m1", issue_after="backward_1")
    budget = case.plan.budgets[Tier.DEVICE]
    refuse(case, sooner, f"at backward_0, budget {budget}, {ACTIVATION} too many")


def test_moved_ops_run_behind_their_op_in_the_order_of_the_plan() -> None:
    case = SOUND["nothing_moves"]()
    moved = (MovedOps(("update_1",), "backward_1"), MovedOps(("update_2",), "backward_1"))
    names = [op.name for op in run_order(case.dataflow, replace(case.plan, moved=moved))]
    assert names[5:] == ["backward_1", "update_1", "update_2", "backward_0", "update_0"]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plan_is_refused(how: str) -> None:
    name, breaking, says = BROKEN[how]
    case = SOUND[name]()
    refuse(case, breaking(case.plan), says)


def test_an_output_must_be_on_the_device_at_the_end() -> None:
    """Here the update that makes it runs on the host, and what it makes on the way stays there."""
    case = SOUND["host_streamed"]()
    *others, last = case.dataflow.ops
    step = replace(
        case.dataflow,
        ops=(*others, replace(last, writes=(*last.writes, "u2"))),
        buffers=(*case.dataflow.buffers, Buffer("u2", 4, Role.TEMPORARY, is_output=True)),
    )
    refuse(Sound(step, case.plan), with_plenty(case.plan), "u2 is not on the device at the end")


def test_the_host_repeats_only_what_the_optimizer_makes() -> None:
    """A value of the forward may be random: its copy on the device is the only one."""
    case = SOUND["host_update_with_a_rate_schedule"]()
    step = replace(
        case.dataflow,
        ops=tuple(
            replace(op, phase=Phase.FORWARD) if op.name == "decay" else op
            for op in case.dataflow.ops
        ),
    )
    refuse(Sound(step, case.plan), case.plan, "needs rate on the host, where no task has sent it")


# Sound plans spoiled at random, in ways that no sound plan survives.

SOUND_PLANS = st.sampled_from(sorted(SOUND)).map(lambda name: SOUND[name]())
WITH_TASKS = SOUND_PLANS.filter(lambda case: bool(case.plan.tasks))


def slots(case: Sound) -> dict[str | None, int]:
    """Where each op of the device runs; None is the end of the step."""
    ops = run_order(case.dataflow, case.plan)
    return {None: len(ops), **{op.name: index for index, op in enumerate(ops)}}


def issue_slot(case: Sound, task: Task) -> int:
    return -1 if task.issue_after is None else slots(case)[task.issue_after]


def in_order_of_issue(case: Sound, plan: Plan) -> Plan:
    """`plan` with its tasks sorted, so that their order is not what is wrong with it."""
    return replace(plan, tasks=tuple(sorted(plan.tasks, key=lambda t: issue_slot(case, t))))


@given(WITH_TASKS, st.data())
def test_no_task_can_be_left_out(case: Sound, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(case.plan.tasks))
    refuse(case, with_plenty(without(case.plan, gone.name)))


@given(WITH_TASKS, st.data())
def test_no_order_can_be_left_out_that_a_wait_does_not_hold(
    case: Sound, data: st.DataObject
) -> None:
    """A wait holds it when it comes before the op that the later task is issued after."""
    tasks = {task.name: task for task in case.plan.tasks}
    needed = [
        (task, name)
        for task in case.plan.tasks
        for name in task.after
        if slots(case)[tasks[name].wait_before] > issue_slot(case, task) + 1
    ]
    assume(needed)
    task, gone = data.draw(st.sampled_from(needed))
    kept = tuple(name for name in task.after if name != gone)
    refuse(case, with_plenty(with_task(case.plan, task.name, after=kept)))


@given(WITH_TASKS, st.data())
def test_no_wait_can_come_before_its_issue(case: Sound, data: st.DataObject) -> None:
    task = data.draw(st.sampled_from(case.plan.tasks))
    earlier = [name for name, slot in slots(case).items() if slot <= issue_slot(case, task)]
    assume(earlier)
    sooner = data.draw(st.sampled_from(earlier))
    refuse(case, with_task(case.plan, task.name, wait_before=sooner))


@given(WITH_TASKS, st.data())
def test_nothing_at_home_on_the_host_can_arrive_after_its_first_use(
    case: Sound, data: st.DataObject
) -> None:
    """An activation can: until the wait, its original is used."""
    ops = run_order(case.dataflow, case.plan)
    uses = {
        task.name: next(op.name for op in ops if task.buffer in op.reads)
        for task in case.plan.transfers
        if task.name.startswith("fetch") and task.buffer not in ("h0",)
    }
    assume(uses)
    name, use = data.draw(st.sampled_from(sorted(uses.items())))
    later = [op for op, slot in slots(case).items() if slot > slots(case)[use]]
    refuse(
        case,
        with_plenty(with_task(case.plan, name, wait_before=data.draw(st.sampled_from(later)))),
    )


@given(WITH_TASKS, st.data())
def test_nothing_can_be_sent_before_its_value_is_complete(case: Sound, data: st.DataObject) -> None:
    ops = run_order(case.dataflow, case.plan)
    written = {
        task.name: max(slot for slot, op in enumerate(ops) if task.buffer in op.writes)
        for task in case.plan.transfers
        if task.direction == "offload" and any(task.buffer in op.writes for op in ops)
    }
    assume(written)
    name, complete = data.draw(st.sampled_from(sorted(written.items())))
    sooner = data.draw(st.sampled_from([None, *(op.name for op in ops[:complete])]))
    spoiled = with_plenty(with_task(case.plan, name, issue_after=sooner))
    refuse(case, in_order_of_issue(case, spoiled))


@given(SOUND_PLANS.filter(lambda case: bool(case.plan.moved)), st.data())
def test_no_update_can_run_before_its_gradient(case: Sound, data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(case.plan.moved) - 1))
    moved = list(case.plan.moved)
    after = moved[which].after
    assume(after is not None)
    assert after is not None
    anchor = case.dataflow.position[after]
    sooner = data.draw(st.sampled_from(case.dataflow.ops[:anchor])).name
    assume(sooner in slots(case) and not any(sooner in entry.ops for entry in moved))
    moved[which] = replace(moved[which], after=sooner)
    refuse(case, with_plenty(replace(case.plan, moved=tuple(moved))))


@given(SOUND_PLANS, st.data())
def test_no_home_and_no_update_mode_can_be_another(case: Sound, data: st.DataObject) -> None:
    homes, updates = case.plan.placement.homes, case.plan.placement.updates
    buffer = data.draw(st.sampled_from(sorted(homes)))
    other = Tier.HOST if homes[buffer] is Tier.DEVICE else Tier.DEVICE
    refuse(case, with_plenty(with_home(case.plan, buffer, other)))
    param = data.draw(st.sampled_from(sorted(updates)))
    mode = data.draw(st.sampled_from([m for m in UpdateMode if m is not updates[param]]))
    refuse(case, with_plenty(with_mode(case.plan, param, mode)))


@given(SOUND_PLANS, st.data())
def test_what_is_offloaded_cannot_be_anything_else(case: Sound, data: st.DataObject) -> None:
    offloaded = case.plan.placement.offloaded
    name = data.draw(st.sampled_from([buffer.name for buffer in case.dataflow.buffers]))
    other = tuple(n for n in offloaded if n != name) if name in offloaded else (*offloaded, name)
    refuse(case, with_plenty(with_placement(case.plan, offloaded=other)))


@given(WITH_TASKS.filter(lambda case: bool(case.plan.transfers)), st.data())
def test_no_transfer_can_move_other_bytes_or_elsewhere(case: Sound, data: st.DataObject) -> None:
    task = data.draw(st.sampled_from(case.plan.transfers))
    wrong = data.draw(st.integers(0, 1 << 40).filter(lambda n: n != task.nbytes))
    refuse(case, with_task(case.plan, task.name, nbytes=wrong))
    elsewhere = "" if task.destination else task.buffer
    refuse(case, with_plenty(with_task(case.plan, task.name, destination=elsewhere)))
    turned = "prefetch" if task.direction == "offload" else "offload"
    refuse(case, with_plenty(with_task(case.plan, task.name, direction=turned)))


@given(SOUND_PLANS, st.sampled_from(MEMORIES), st.data())
def test_no_budget_below_the_peak_is_enough(case: Sound, tier: Tier, data: st.DataObject) -> None:
    budget = data.draw(st.integers(-1, case.plan.budgets[tier] - 1))
    refuse(case, replace(case.plan, budgets={**case.plan.budgets, tier: budget}))


def test_random_ops_keep_their_order() -> None:
    """Two ops that share nothing but the generator that both draw from."""
    dataflow = Dataflow(
        "draws",
        tuple(
            Op(name, "aten.rand.default", Phase.FORWARD, ("generator",), ("generator", made))
            for name, made in (("first", "a"), ("second", "b"))
        ),
        (
            Buffer("generator", 0, Role.RNG, is_input=True, is_output=True),
            *(Buffer(made, 4, Role.TEMPORARY, is_output=True) for made in ("a", "b")),
        ),
    )
    whole = sound(dataflow, {}, ())
    check(whole.problem, whole.plan)
    swapped = replace(whole.plan, moved=(MovedOps(("second",), None),))
    with pytest.raises(PlanError, match="second needs generator as first left it"):
        replay(dataflow, swapped)


def test_an_update_that_draws_is_no_update_group() -> None:
    dataflow = chain(1)
    generator = Buffer("generator", 0, Role.RNG, is_input=True, is_output=True)
    drawing = tuple(
        replace(op, reads=(*op.reads, "generator")) if op.name == "update_0" else op
        for op in dataflow.ops
    )
    with pytest.raises(ValueError, match="update_0 of the update of w0 draws random numbers"):
        replace(dataflow, ops=drawing, buffers=(*dataflow.buffers, generator))


def test_a_step_by_layer_in_a_wrong_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes the order: the check has code of its own for what each op must find."""
    case = SOUND["nothing_moves"]()

    def swapped(step: Dataflow, layers: int) -> Dataflow:
        first, second, *others = step.ops
        return replace(step, ops=(second, first, *others))

    monkeypatch.setattr("cotrain_compile.placement.check.check.in_packs", swapped)
    refuse(case, case.plan, "where micro-batches run by layer, op forward_1 finds h0")


def test_a_kept_gradient_that_rests_on_the_host_goes_home_and_nowhere_else() -> None:
    step = chain(3)
    kept = Buffer("g0", WEIGHT, Role.GRADIENT, is_input=True, param="w0")
    buffers = tuple(kept if buffer.name == "g0" else buffer for buffer in step.buffers)
    step = replace(step, buffers=buffers)
    modes, on_host = {"w0": UpdateMode.STREAMED}, ("w0", "g0")
    up = (fetch("w0", None, "forward_0"), fetch("g0", None, "forward_0"))
    down = (store("g0", "update_0", None), store("w0", "update_0", None))
    home = sound(step, modes, on_host, (*up, *down))
    check(home.problem, home.plan)
    offloaded = with_task(home.plan, "store.g0", destination="")
    refuse(home, offloaded, "store.g0 copies g0, which is on the host")
