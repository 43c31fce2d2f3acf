"""Sound plans made by hand, one for each way to place something, with budgets of just their peaks.

Tasks are called after what they do: offload.g0 and fetch.h0 make fresh copies, refetch.h0 a second
one, store.m0 writes a state back to its home, update.w0 and cast.p32_0 run on the host, back.w0
moves an updated parameter over the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.plan import (
    HostRegion,
    MovedOps,
    Placement,
    Plan,
    Task,
    Timeline,
    Transfer,
    UpdateMode,
)
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step

RESIDENT, STREAMED = UpdateMode.RESIDENT, UpdateMode.STREAMED
HOST, HOST_STREAMED = UpdateMode.HOST, UpdateMode.HOST_STREAMED
PLENTY = 1 << 62


@dataclass(frozen=True)
class Sound:
    """A step with a sound plan for it."""

    dataflow: Dataflow
    plan: Plan

    @property
    def problem(self) -> Problem:
        return formulate(self.dataflow, find("h100"), self.plan.budgets)


def sound(
    dataflow: Dataflow,
    modes: Mapping[str, UpdateMode],
    on_host: tuple[str, ...],
    tasks: tuple[Task, ...] = (),
    moved: tuple[MovedOps, ...] = (),
    offloaded: tuple[str, ...] = (),
) -> Sound:
    """The plan in which `modes` and `on_host` differ from everything resident."""
    start = resident(dataflow)
    placement = Placement(
        policy="by hand",
        homes={**start.homes, **dict.fromkeys(on_host, Tier.HOST)},
        updates={**start.updates, **modes},
        offloaded=offloaded,
    )
    sized = tuple(
        replace(task, nbytes=dataflow.buffer[task.buffer].nbytes)
        if isinstance(task, Transfer)
        else replace(task, ops=task.ops or dataflow.update[task.param].ops)
        for task in tasks
    )
    budgets = {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}
    nothing = Timeline("predicted", (), {})
    plan = Plan(dataflow.fingerprint, "h100", budgets, placement, sized, nothing, moved=moved)
    return Sound(dataflow, with_least_budgets(dataflow, plan))


def with_least_budgets(dataflow: Dataflow, plan: Plan) -> Plan:
    peaks = replay(dataflow, plan)
    return replace(plan, budgets={tier: peak.nbytes for tier, peak in peaks.items()})


def offload(buffer: str, issue: str | None, wait: str | None) -> Transfer:
    return Transfer(f"offload.{buffer}", "offload", buffer, 0, issue, wait)


def store(buffer: str, issue: str | None, wait: str | None) -> Transfer:
    return Transfer(f"store.{buffer}", "offload", buffer, 0, issue, wait, (), buffer)


def fetch(buffer: str, issue: str | None, wait: str | None, *after: str) -> Transfer:
    return Transfer(f"fetch.{buffer}", "prefetch", buffer, 0, issue, wait, after)


def refetch(buffer: str, issue: str | None, wait: str | None, *after: str) -> Transfer:
    return replace(fetch(buffer, issue, wait, *after), name=f"refetch.{buffer}")


def back(param: str, issue: str | None, wait: str | None) -> Transfer:
    after = (f"update.{param}",)
    return Transfer(f"back.{param}", "prefetch", param, 0, issue, wait, after, param)


def update(param: str, issue: str | None, wait: str | None, *after: str) -> HostRegion:
    return HostRegion(f"update.{param}", param, (), issue, wait, after)


def cast(param: str, makes: str, op: str, wait: str | None) -> HostRegion:
    return HostRegion(f"cast.{param}", param, (op,), None, wait, makes=makes)


def chain_that_reads_a_weight_late() -> Dataflow:
    """A chain of three that reads w1 once more in its backward, and once after its update."""
    step = chain(3, batch=1)
    first_update = step.position["update_0"]
    reread = Op("reread", "test.reread", Phase.BACKWARD, ("w1",), ("r",), 10, 10)
    norm = Op("norm", "test.norm", Phase.OPTIMIZER, ("w1", "r"), ("n",), 10, 10)
    outputs = [Buffer(name, 4, Role.TEMPORARY, is_output=True) for name in ("r", "n")]
    ops = (*step.ops[:first_update], reread, *step.ops[first_update:], norm)
    return replace(step, ops=ops, buffers=(*step.buffers, *outputs), fingerprint="late")


def clipped_chain() -> Dataflow:
    """A chain of three whose updates all read `coef`, made by the op `clip` from all gradients."""
    step = chain(3)
    first_update = step.position["update_0"]
    gradients = ("g0", "g1", "g2")
    clip = Op("clip", "test.clip", Phase.OPTIMIZER, gradients, ("coef",), 10, 10)
    updates = [replace(op, reads=(*op.reads, "coef")) for op in step.ops[first_update:]]
    return replace(
        step,
        ops=(*step.ops[:first_update], clip, *updates),
        buffers=(*step.buffers, Buffer("coef", 4, Role.TEMPORARY)),
        updates=tuple(replace(group, scalars=("coef",)) for group in step.updates),
        fingerprint="clipped",
    )


def step_with_a_rate_schedule() -> Dataflow:
    """A mixed-precision step whose update reads `rate`, which the op `decay` makes from lr."""
    step = mixed_precision_step(1)
    *others, last = step.ops
    decay = Op("decay", "test.decay", Phase.OPTIMIZER, ("lr",), ("rate",), 1, 8)
    reads = tuple("rate" if name == "lr" else name for name in last.reads)
    return replace(
        step,
        ops=(*others, decay, replace(last, reads=reads)),
        buffers=(*step.buffers, Buffer("rate", 4, Role.TEMPORARY)),
        fingerprint="decay",
    )


def chain_with_a_frozen_weight() -> Dataflow:
    """A chain of three in which nothing updates w0."""
    step = chain(3)
    ops = tuple(op for op in step.ops if op.name != "update_0")
    return replace(step, ops=ops, updates=step.updates[1:], fingerprint="frozen")


def nothing_moves() -> Sound:
    return sound(chain(3), {}, ())


def updates_run_early() -> Sound:
    moved = (MovedOps(("update_2",), "backward_2"), MovedOps(("update_1",), "backward_1"))
    return sound(chain(3), {}, (), moved=moved)


def streamed_states() -> Sound:
    """m2 for an update that runs early, m1 for one at its place; m0 stays."""
    tasks = (
        fetch("m2", "loss", "update_2"),
        store("m2", "update_2", "backward_1"),
        fetch("m1", "backward_0", "update_1"),
        store("m1", "update_1", None),
    )
    moved = (MovedOps(("update_2",), "backward_2"),)
    return sound(chain(3), {"w1": STREAMED, "w2": STREAMED}, ("m1", "m2"), tasks, moved)


def streamed_weight() -> Sound:
    """w0 at home on the host too, and offloaded between forward and backward."""
    tasks = (
        fetch("w0", None, "forward_0"),
        refetch("w0", "backward_2", "backward_0"),
        fetch("m0", "backward_1", "update_0"),
        store("w0", "update_0", None),
        store("m0", "update_0", None),
    )
    return sound(chain(3), {"w0": STREAMED}, ("w0", "m0"), tasks, offloaded=("w0",))


def streamed_low_precision() -> Sound:
    """The host makes p16_1; p32_1 itself comes only for its update, which runs early."""
    tasks = (
        cast("p32_1", "p16_1", "cast_p_1", "forward_1"),
        fetch("p16_1", "cast_p_0", "forward_1", "cast.p32_1"),
        fetch("p32_1", "forward_1", "update_1"),
        fetch("m_1", "forward_1", "update_1"),
        fetch("v_1", "backward_1", "update_1"),
        store("p32_1", "update_1", "backward_0"),
        store("m_1", "update_1", "backward_0"),
        store("v_1", "update_1", None),
    )
    moved = (MovedOps(("cast_g_1", "update_1"), "backward_1"),)
    homes = ("p32_1", "m_1", "v_1")
    return sound(mixed_precision_step(2), {"p32_1": STREAMED}, homes, tasks, moved)


def host_update() -> Sound:
    tasks = (
        offload("w1", None, "backward_2"),
        offload("g1", "backward_1", "backward_0"),
        update("w1", "reread", "norm", "offload.w1", "offload.g1"),
        back("w1", "reread", "norm"),
    )
    return sound(chain_that_reads_a_weight_late(), {"w1": HOST}, ("m1",), tasks)


def host_update_with_a_clip_scalar() -> Sound:
    tasks = (
        offload("w2", None, "loss"),
        offload("g2", "backward_2", "update_0"),
        offload("coef", "clip", "update_0"),
        update("w2", "clip", None, "offload.w2", "offload.g2", "offload.coef"),
        back("w2", "clip", None),
    )
    return sound(clipped_chain(), {"w2": HOST}, ("m2",), tasks)


def host_update_with_a_rate_schedule() -> Sound:
    """Nobody sends `rate`: the host repeats what follows from hyper-parameters alone."""
    tasks = (
        offload("p32_0", None, "forward_0"),
        offload("g16_0", "backward_0", "decay"),
        update("p32_0", "backward_0", None, "offload.p32_0", "offload.g16_0"),
        back("p32_0", "backward_0", None),
    )
    return sound(step_with_a_rate_schedule(), {"p32_0": HOST}, ("m_0", "v_0"), tasks)


def host_streamed() -> Sound:
    tasks = (
        fetch("w2", "forward_0", "forward_2"),
        offload("g2", "backward_2", "backward_1"),
        update("w2", "backward_2", None, "offload.g2"),
    )
    return sound(chain(3), {"w2": HOST_STREAMED}, ("w2", "m2"), tasks)


def host_streamed_read_late() -> Sound:
    """w1 is read once more after its gradient is there; its update waits for that fetch."""
    step = chain_that_reads_a_weight_late()
    step = replace(step, ops=step.ops[:-1], fingerprint="reread")
    tasks = (
        fetch("w1", None, "forward_1"),
        offload("g1", "backward_1", "backward_0"),
        refetch("w1", "backward_1", "reread"),
        update("w1", "backward_0", None, "offload.g1", "refetch.w1"),
    )
    return sound(step, {"w1": HOST_STREAMED}, ("w1", "m1"), tasks, offloaded=("w1",))


def host_streamed_low_precision() -> Sound:
    """p16_0 is made on the host and fetched for the forward and again for the backward."""
    tasks = (
        cast("p32_0", "p16_0", "cast_p_0", "forward_0"),
        fetch("p16_0", None, "forward_0", "cast.p32_0"),
        refetch("p16_0", "forward_1", "backward_0"),
        offload("g16_0", "backward_0", "cast_g_1"),
        update("p32_0", "backward_0", None, "offload.g16_0"),
    )
    homes = ("p32_0", "m_0", "v_0")
    modes = {"p32_0": HOST_STREAMED}
    return sound(mixed_precision_step(2), modes, homes, tasks, offloaded=("p16_0",))


def frozen_weight() -> Sound:
    tasks = (fetch("w0", None, "forward_0"), refetch("w0", "backward_2", "backward_0"))
    return sound(chain_with_a_frozen_weight(), {}, ("w0",), tasks, offloaded=("w0",))


def activation_offloaded() -> Sound:
    tasks = (
        offload("h0", "forward_1", "loss"),
        fetch("h0", "forward_2", "backward_1", "offload.h0"),
    )
    return sound(chain(3), {}, (), tasks, offloaded=("h0",))


def everything_at_once() -> Sound:
    tasks = (
        fetch("w0", None, "forward_0"),
        offload("w2", None, "backward_3"),
        offload("h0", "forward_1", "forward_3"),
        refetch("w0", "loss", "backward_0"),
        fetch("m1", "backward_3", "update_1"),
        offload("g2", "backward_2", "backward_1"),
        fetch("h0", "backward_2", "backward_1", "offload.h0"),
        update("w2", "backward_2", None, "offload.w2", "offload.g2"),
        back("w2", "backward_2", None),
        store("m1", "update_1", None),
        offload("g0", "backward_0", None),
        update("w0", "backward_0", None, "offload.g0"),
    )
    modes = {"w0": HOST_STREAMED, "w1": STREAMED, "w2": HOST}
    moved = (MovedOps(("update_3",), "backward_3"), MovedOps(("update_1",), "backward_1"))
    return sound(chain(4), modes, ("w0", "m0", "m1", "m2"), tasks, moved, ("w0", "h0"))


SOUND: Mapping[str, Callable[[], Sound]] = {
    make.__name__: make
    for make in (
        nothing_moves,
        updates_run_early,
        streamed_states,
        streamed_weight,
        streamed_low_precision,
        host_update,
        host_update_with_a_clip_scalar,
        host_update_with_a_rate_schedule,
        host_streamed,
        host_streamed_read_late,
        host_streamed_low_precision,
        frozen_weight,
        activation_offloaded,
        everything_at_once,
    )
}
