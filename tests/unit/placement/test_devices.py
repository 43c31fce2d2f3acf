"""Two devices with one host and one link: a step split, planned, simulated by hand and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.files import from_json, load, to_json
from cotrain_compile.machine import HostUpdate, Link, Machine, Tier, TierSpec, two_tier
from cotrain_compile.machine_devices import seen_from, side_by_side
from cotrain_compile.placement.check.joint_check import check_joint
from cotrain_compile.placement.devices.assign import stages
from cotrain_compile.placement.devices.plan_devices import plan_devices
from cotrain_compile.placement.devices.simulate_devices import joined, problem_of
from cotrain_compile.placement.devices.split import formulate_jointly
from cotrain_compile.placement.joint import JointPlan, JointProblem, Message
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings
from cotrain_compile.plan import Placement
from cotrain_compile.presets import find
from tests.support.dataflows import chain

ONE, OTHER = "device0", "device1"
# An op takes a second, a copy a second for each 100 bytes.
SECOND = TierSpec(1 << 40, 1e15, {"float32": 1e15}, launch_s=1.0)
SLOW = two_tier("slow", SECOND, SECOND, Link(100.0), Link(100.0), HostUpdate(1e15))
PLENTY = {ONE: 1 << 30, OTHER: 1 << 30, "host": 1 << 30}


def op(name: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Op:
    return Op(name, f"aten.{name}", Phase.FORWARD, reads, writes, flops=1)


def two_stages() -> Dataflow:
    """`a` makes y of v, `b` makes z of w, `c` on the other device makes the result of both."""
    return Dataflow(
        "two-stages",
        (op("a", ("v",), ("y",)), op("b", ("w",), ("z",)), op("c", ("y", "z"), ("result",))),
        (
            Buffer("v", 400, Role.PARAM, is_input=True, is_output=True),
            Buffer("w", 200, Role.PARAM, is_input=True, is_output=True),
            Buffer("y", 100, Role.TEMPORARY),
            Buffer("z", 100, Role.TEMPORARY),
            Buffer("result", 4, Role.TEMPORARY, is_output=True),
        ),
    )


def stages_on(machine: Machine, budgets: Mapping[str, int] = PLENTY) -> JointProblem:
    return formulate_jointly(two_stages(), machine, budgets, {"a": ONE, "b": OTHER, "c": OTHER})


def fetching(problem: JointProblem) -> JointPlan:
    """Both weights at home on the host, and fetched when the step begins."""
    plans = {}
    for device, weight in ((ONE, "v"), (OTHER, "w")):
        part = problem_of(problem, device, 1 << 20)
        plans[device] = schedule(part, Placement("by hand", {weight: Tier.HOST}, {}))
    return joined(problem, plans)


def spans(plan: JointPlan) -> dict[str, tuple[str, float, float]]:
    return {s.name: (s.lane, s.start_s, s.end_s) for s in plan.predicted.spans}


def test_copies_to_two_devices_share_the_link_of_their_host() -> None:
    """4 s and 2 s of copies at half speed: 2 s of each are done after 4 s, 2 s of one are left.

    y then goes to the host and from there to the other device, a second each way.
    """
    plan = fetching(stages_on(side_by_side(SLOW, 2, together=1.0)))
    assert spans(plan) == {
        f"{OTHER}/fetch.w": ("h2d1", 0.0, 4.0),
        f"{ONE}/fetch.v": ("h2d0", 0.0, 6.0),
        f"{OTHER}/b": (OTHER, 4.0, 5.0),
        f"{ONE}/a": (ONE, 6.0, 7.0),
        "d2h0/send.y.device1": ("d2h0", 7.0, 8.0),
        "h2d1/send.y.device1": ("h2d1", 8.0, 9.0),
        f"{OTHER}/receive.y.device1": (OTHER, 9.0, 9.0),
        f"{OTHER}/c": (OTHER, 9.0, 10.0),
    }


def test_with_a_link_each_or_one_between_them_they_do_not_wait() -> None:
    apart = side_by_side(SLOW, 2, together=2.0)
    assert fetching(stages_on(apart)).step_s == 8.0
    peers = replace(apart, links={**apart.links, "peer": Link(200.0, source=ONE, target=OTHER)})
    plan = fetching(stages_on(peers))
    assert spans(plan)["peer/send.y.device1"] == ("peer", 5.0, 5.5)
    assert plan.step_s == 6.5


def test_a_device_sees_of_the_link_what_the_others_leave() -> None:
    """Of two devices under 1.0 each way, 1.8 both: four busy links have 1.8 / 4 each."""
    machine = side_by_side(SLOW.but(duplex=1.8), 2)
    assert seen_from(machine, ONE).h2d.bytes_per_s == SLOW.h2d.bytes_per_s
    assert seen_from(machine, ONE).duplex == pytest.approx(1.8)
    assert seen_from(machine, ONE, crowded=True).h2d.bytes_per_s == pytest.approx(45.0)
    with pytest.raises(ValueError, match="no link from device7 to host"):
        seen_from(machine, "device7")


def test_each_space_has_a_budget_of_its_own() -> None:
    """Ledger by hand: v and y; w and z, y comes when w has gone; both weights, and y on its way."""
    problem = stages_on(side_by_side(SLOW, 2))
    plan = fetching(problem)
    check_joint(problem, plan)
    assert plan.peak_bytes == {ONE: 500, OTHER: 300, "host": 700}
    for space, needed in plan.peak_bytes.items():
        tight = replace(problem, budgets={**problem.budgets, space: needed})
        check_joint(tight, plan)
        less = replace(problem, budgets={**problem.budgets, space: needed - 1})
        with pytest.raises(PlanError, match=f"on the {space} .* 1 too many"):
            check_joint(less, plan)


def test_what_crosses_is_sent_once_from_where_it_is_made() -> None:
    problem = stages_on(side_by_side(SLOW, 2))
    plan = fetching(problem)
    (message,) = problem.messages
    cases: tuple[tuple[tuple[Message, ...], str], ...] = (
        ((), "the part of device1 has other ops than the step"),
        ((replace(message, before="c"),), "the part of device1 has other ops than the step"),
        ((replace(message, after="b"),), "goes from device0 to device1"),
        ((replace(message, after="moon"),), "follows moon, which no device runs"),
        ((replace(message, buffer="z"),), "receive.y.device1 does not receive z"),
        ((replace(message, nbytes=4),), "moves 4 bytes of 100"),
        ((message, message), "sent to a device twice"),
    )
    for messages, complaint in cases:
        with pytest.raises(PlanError, match=complaint):
            check_joint(replace(problem, messages=messages), plan)


def test_what_crosses_is_received_before_it_is_read() -> None:
    problem = stages_on(side_by_side(SLOW, 2))
    plan = fetching(problem)
    part = problem.parts[OTHER]
    b, receive, c = part.ops
    assert (receive.name, receive.writes, c.name) == ("receive.y.device1", ("y",), "c")
    cases: tuple[tuple[tuple[Op, ...], str | None], ...] = (
        ((receive, b, c), None),  # earlier than it has to be
        ((b, c, receive), "y, which is not on the device"),
        ((b, c), "device1 does not receive all of it"),
        ((b, replace(receive, target="aten.empty"), c), "does not receive y"),
        ((b, replace(receive, flops=1), c), "does not receive y"),
    )
    for ops, complaint in cases:
        changed = replace(problem, parts={**problem.parts, OTHER: replace(part, ops=ops)})
        if complaint is None:
            check_joint(changed, plan)
            continue
        with pytest.raises(PlanError, match=complaint):
            check_joint(changed, plan)


def test_devices_that_wait_for_each_other_are_refused() -> None:
    """The first device would receive before `a` what `c` makes of the result of `a`."""
    step = two_stages()
    whole = replace(
        step,
        ops=(*step.ops, op("back", ("result",), ("end",))),
        buffers=(*step.buffers, Buffer("end", 4, Role.TEMPORARY, is_output=True)),
    )
    device_of = {"a": ONE, "b": OTHER, "c": OTHER, "back": ONE}
    problem = formulate_jointly(whole, side_by_side(SLOW, 2), PLENTY, device_of)
    plan = fetching(problem)
    check_joint(problem, plan)
    part = problem.parts[ONE]
    a, receive, back = part.ops
    early = replace(problem, parts={**problem.parts, ONE: replace(part, ops=(receive, a, back))})
    with pytest.raises(PlanError, match="devices wait for each other"):
        check_joint(early, plan)
    with pytest.raises(PlanError, match="can never start; these wait for each other"):
        fetching(early)


@pytest.mark.parametrize(
    ("device_of", "complaint"),
    [
        ({"a": ONE, "b": ONE}, "no device is named for c"),
        ({"a": ONE, "b": ONE, "c": "moon"}, "no devices of 2 x slow"),
    ],
)
def test_a_step_needs_a_device_for_each_op(device_of: dict[str, str], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        formulate_jointly(two_stages(), side_by_side(SLOW, 2), PLENTY, device_of)


def halves(layers: int) -> tuple[Dataflow, dict[str, str]]:
    """Two chains beside each other, as of two models in one step, and a device for each."""
    ops: list[Op] = []
    buffers: list[Buffer] = []
    updates: list[UpdateGroup] = []
    device_of: dict[str, str] = {}
    for device in (ONE, OTHER):
        half = chain(layers, width=256, batch=256)

        def own(name: str, device: str = device) -> str:
            return f"{device}.{name}"

        for item in half.ops:
            reads, writes = tuple(map(own, item.reads)), tuple(map(own, item.writes))
            ops.append(replace(item, name=own(item.name), reads=reads, writes=writes))
            device_of[own(item.name)] = device
        buffers += [replace(buffer, name=own(buffer.name)) for buffer in half.buffers]
        for group in half.updates:
            own_ops, states = tuple(map(own, group.ops)), tuple(map(own, group.states))
            updates.append(
                replace(
                    group,
                    param=own(group.param),
                    gradient=own(group.gradient),
                    states=states,
                    ops=own_ops,
                )
            )
    return Dataflow("halves", tuple(ops), tuple(buffers), tuple(updates)), device_of


def test_two_halves_are_planned_within_their_budgets() -> None:
    """In two thirds of what they need; sharing a link, and updates of the host, takes longer."""
    dataflow, device_of = halves(3)
    fast = TierSpec(1 << 40, 1e11, {"float32": 1e12}, launch_s=1e-6)
    one = two_tier("one", fast, fast, Link(1e10), Link(1e10), HostUpdate(2e10))
    machine = side_by_side(one, 2)
    free = plan_devices(formulate_jointly(dataflow, machine, PLENTY, device_of))
    assert free.peak_bytes["host"] == 0
    budgets = {ONE: free.peak_bytes[ONE] * 2 // 3, OTHER: free.peak_bytes[OTHER] * 2 // 3}
    problem = formulate_jointly(dataflow, machine, {**budgets, "host": 1 << 30}, device_of)
    plan = plan_devices(problem)
    check_joint(problem, plan)
    alone = max(of_device.predicted.makespan_s for of_device in plan.plans.values())
    assert all(of_device.tasks for of_device in plan.plans.values())
    assert plan.step_s > alone
    little = {**problem.budgets, "host": plan.peak_bytes["host"] - 1}
    with pytest.raises(PlacementError):
        plan_devices(replace(problem, budgets=little))


def test_an_update_spread_over_devices_is_refused() -> None:
    dataflow, device_of = halves(1)
    device_of[f"{ONE}.update_0"] = OTHER
    machine = side_by_side(SLOW, 2)
    with pytest.raises(PlanError, match=rf"forward_0 reads {ONE}.w0 on {ONE} while .* put both on"):
        formulate_jointly(dataflow, machine, PLENTY, device_of)


def test_an_update_on_the_host_waits_for_what_another_device_makes() -> None:
    """A scalar crosses to the device of the update, and goes on to the host from there."""
    step = chain(1)
    scaled = [replace(o, reads=(*o.reads, "s")) if o.name == "update_0" else o for o in step.ops]
    dataflow = replace(
        step,
        ops=(op("scale", (), ("s",)), *scaled),
        buffers=(*step.buffers, Buffer("s", 4, Role.TEMPORARY)),
        updates=(replace(step.updates[0], scalars=("s",)),),
    )
    device_of = {o.name: ONE if o.name == "scale" else OTHER for o in dataflow.ops}
    problem = formulate_jointly(dataflow, side_by_side(SLOW, 2), PLENTY, device_of)
    plan = plan_devices(problem, SolveSettings("zero-offload"))
    check_joint(problem, plan)
    assert [region.param for region in plan.plans[OTHER].host_updates] == ["w0"]
    when = spans(plan)
    arrived_s, sent_s = when["h2d1/send.s.device1"][2], when["device1/offload.s"][1]
    assert arrived_s <= sent_s < when["device1/update.w0"][1]


def test_a_model_is_cut_into_stages_by_its_modules() -> None:
    """A captured GPT of four blocks: its activation crosses forwards, its gradient backwards.

    Clipping gathers the norms of the second stage on the first, and brings the factor back.
    """
    dataflow = load(Path(__file__).parents[2] / "problems" / "gpt.json", Dataflow)
    first, second = ("character", "position", "blocks.0", "blocks.1"), ("blocks", "norm", "head")
    device_of = stages(dataflow, {**dict.fromkeys(second, OTHER), **dict.fromkeys(first, ONE)})
    machine = side_by_side(find("rtx4090"), 2)
    problem = formulate_jointly(dataflow, machine, dict.fromkeys(PLENTY, 1 << 40), device_of)
    large = [(m.buffer, m.source) for m in problem.messages if m.nbytes > 4]
    assert large == [("add_4", ONE), ("add_12", OTHER)]
    whole = plan_devices(problem, SolveSettings("resident"))
    check_joint(problem, whole)
    budgets = {device: whole.peak_bytes[device] * 9 // 10 for device in (ONE, OTHER)}
    tight = replace(problem, budgets={**problem.budgets, **budgets})
    plan = plan_devices(tight, SolveSettings("streamed"))
    check_joint(tight, plan)
    assert all(plan.peak_bytes[device] <= budgets[device] for device in budgets)
    assert plan.step_s > whole.step_s
    assert from_json(to_json(plan), JointPlan) == plan
    with pytest.raises(PlanError, match=r"no op is in module 'block'; modules are .*blocks\.0"):
        stages(dataflow, {"block": ONE})
