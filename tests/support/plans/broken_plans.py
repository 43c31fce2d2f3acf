"""Broken plans: sound ones whose tasks and placement no longer fit; and how to spoil more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.plan import Plan, Task, Transfer, UpdateMode
from tests.support.plans.sound_plans import (
    PLENTY,
    STREAMED,
    back,
    fetch,
    offload,
    store,
    update,
)

WEIGHT = 4 * 64 * 64  # bytes, of a chain


def with_task(plan: Plan, name: str, **changes: object) -> Plan:
    """`plan` with some fields of one task changed."""
    assert any(task.name == name for task in plan.tasks)
    changed = tuple(
        replace(task, **changes) if task.name == name else task  # type: ignore[arg-type]
        for task in plan.tasks
    )
    return replace(plan, tasks=changed)


def without(plan: Plan, *names: str) -> Plan:
    """`plan` without the tasks of these names, and nothing waiting for them."""
    kept = tuple(
        replace(task, after=tuple(n for n in task.after if n not in names))
        for task in plan.tasks
        if task.name not in names
    )
    assert len(kept) == len(plan.tasks) - len(names)
    return replace(plan, tasks=kept)


def with_more(plan: Plan, task: Task, nbytes: int = WEIGHT) -> Plan:
    """`plan` with one more task, listed last."""
    if isinstance(task, Transfer):
        task = replace(task, nbytes=nbytes)
    return replace(plan, tasks=(*plan.tasks, task))


def with_placement(plan: Plan, **changes: object) -> Plan:
    return replace(plan, placement=replace(plan.placement, **changes))  # type: ignore[arg-type]


def with_home(plan: Plan, buffer: str, tier: Tier) -> Plan:
    return with_placement(plan, homes={**plan.placement.homes, buffer: tier})


def with_mode(plan: Plan, param: str, mode: UpdateMode) -> Plan:
    return with_placement(plan, updates={**plan.placement.updates, param: mode})


def with_plenty(plan: Plan) -> Plan:
    """Budgets that hide what is too much, so that only the order can be wrong."""
    return replace(plan, budgets=dict.fromkeys(MEMORIES, PLENTY))


def with_early_update(plan: Plan, name: str) -> Plan:
    """The update `name` issued before the fetch that it comes after, waiting for its gradient."""
    (region,) = (task for task in plan.tasks if task.name == name)
    others = [task for task in plan.tasks if task is not region]
    early = replace(region, issue_after="backward_1", after=region.after[:1])
    return replace(plan, tasks=(*others[:2], early, *others[2:]))


Breaking = Callable[[Plan], Plan]

# Plan, how it is broken, what the refusal says.
BROKEN_RULES: Mapping[str, tuple[str, Breaking, str]] = {
    # The placement.
    "another step": (
        "nothing_moves",
        lambda p: replace(p, fingerprint="other"),
        "was made for step other",
    ),
    "a budget too few": (
        "nothing_moves",
        lambda p: replace(p, budgets={Tier.DEVICE: PLENTY}),
        "every space of the machine but a drive needs a budget",
    ),
    "a home too few": (
        "nothing_moves",
        lambda p: with_placement(p, homes={}),
        "every persistent buffer needs one home",
    ),
    "an update mode too few": (
        "nothing_moves",
        lambda p: with_placement(p, updates={}),
        "every parameter needs one update mode",
    ),
    "a resident weight at home on the host": (
        "nothing_moves",
        lambda p: with_home(p, "w0", Tier.HOST),
        "w0 is not at home on the device",
    ),
    "a host update whose state is at home on the device": (
        "host_update",
        lambda p: with_home(p, "m1", Tier.DEVICE),
        "m1 is not at home on the host",
    ),
    "a host-streamed weight at home on the device": (
        "host_streamed",
        lambda p: with_home(p, "w2", Tier.DEVICE),
        "w2 is not at home on the host",
    ),
    "a streamed update with nothing to stream": (
        "nothing_moves",
        lambda p: with_mode(p, "w0", STREAMED),
        "w0 is streamed, but nothing of it is on the host",
    ),
    "an input that is to be offloaded": (
        "nothing_moves",
        lambda p: with_placement(p, offloaded=("x",)),
        "names x, which is neither a temporary nor a parameter at home on the host",
    ),
    "an output that is to be offloaded": (
        "nothing_moves",
        lambda p: with_placement(p, offloaded=("loss",)),
        "names loss, which is neither a temporary",
    ),
    "something unknown that is to be offloaded": (
        "nothing_moves",
        lambda p: with_placement(p, offloaded=("h9",)),
        "names h9, which the step has not",
    ),
    "an activation that is to be offloaded twice": (
        "activation_offloaded",
        lambda p: with_placement(p, offloaded=("h0", "h0")),
        "placement.offloaded names a buffer twice",
    ),
    "an activation that is to be offloaded and stays": (
        "nothing_moves",
        lambda p: with_placement(p, offloaded=("h0",)),
        "h0 is fetched 0 times, the placement asks for 1",
    ),
    "an activation that goes though it is to stay": (
        "activation_offloaded",
        lambda p: with_placement(p, offloaded=()),
        "fetches h0, which the placement does not have on the host",
    ),
    "a weight that is to be offloaded and is fetched once": (
        "frozen_weight",
        lambda p: without(p, "refetch.w0"),
        "w0 is fetched 1 times, the placement asks for 2",
    ),
    "a weight that is fetched twice though it is to stay": (
        "frozen_weight",
        lambda p: with_placement(p, offloaded=()),
        "w0 is fetched 2 times, the placement asks for 1",
    ),
    # Tasks and the placement.
    "two tasks of one name": (
        "host_update",
        lambda p: replace(p, tasks=(*p.tasks, p.tasks[0])),
        "two tasks share a name",
    ),
    "a gradient sent twice": (
        "host_streamed",
        lambda p: with_more(p, replace(offload("g2", "backward_2", None), name="again")),
        "g2 is copied to the host twice",
    ),
    "a state written back twice": (
        "streamed_states",
        lambda p: with_more(p, replace(store("m1", "update_1", None), name="again")),
        "m1 is written back twice",
    ),
    "a parameter moved back twice": (
        "host_update",
        lambda p: with_more(p, replace(back("w1", "reread", "norm"), name="again")),
        "w1 is moved back twice",
    ),
    "a state fetched twice": (
        "streamed_states",
        lambda p: with_more(p, replace(fetch("m1", "update_1", None), name="again")),
        "m1 is fetched 2 times, the placement asks for 1",
    ),
    "a host update without its region": (
        "host_streamed",
        lambda p: without(p, "update.w2"),
        "host regions and host updates do not match: ['w2']",
    ),
    "a region for a resident update": (
        "nothing_moves",
        lambda p: with_more(p, replace(update("w0", None, None), ops=("update_0",))),
        "host regions and host updates do not match: ['w0']",
    ),
    "an update run twice": (
        "host_streamed",
        lambda p: with_more(p, replace(p.host_updates[0], name="again")),
        "w2 is updated on the host twice",
    ),
    "a region that leaves an op out": (
        "host_streamed_low_precision",
        lambda p: with_task(p, "update.p32_0", ops=("update_0",)),
        "update.p32_0 does not run the update of p32_0",
    ),
    "a cast of something else": (
        "host_streamed_low_precision",
        lambda p: with_task(p, "cast.p32_0", makes="p16_1"),
        "p16_1, which is not the low-precision copy of p32_0",
    ),
    "a cast by another op": (
        "host_streamed_low_precision",
        lambda p: with_task(p, "cast.p32_0", ops=("cast_p_1",)),
        "cast.p32_0 does not run the cast that makes p16_0",
    ),
    "a cast of a parameter at home on the device": (
        "streamed_low_precision",
        lambda p: with_home(p, "p32_1", Tier.DEVICE),
        "reads p32_1 on the host, but it is not at home there",
    ),
    "a copy made twice": (
        "streamed_low_precision",
        lambda p: with_more(p, replace(p.host_regions[0], name="again")),
        "p16_1 is made on the host twice",
    ),
    "too few bytes": (
        "host_update",
        lambda p: with_task(p, "offload.g1", nbytes=7),
        f"offload.g1 moves 7 bytes of {WEIGHT}",
    ),
    "a transfer of an unknown buffer": (
        "host_update",
        lambda p: with_task(p, "offload.g1", buffer="g9"),
        "moves g9, which the step has not",
    ),
    "a transfer over another buffer": (
        "streamed_states",
        lambda p: with_task(p, "store.m1", destination="m2"),
        "store.m1 moves m1 over m2, another buffer",
    ),
    "a host-streamed weight that is also moved back": (
        "host_streamed",
        lambda p: with_more(p, back("w2", "update_1", None)),
        "back.w2 overwrites w2, which the host does not update",
    ),
    "a host-streamed weight that is also written back": (
        "host_streamed",
        lambda p: with_more(p, store("w2", "update_1", None)),
        "store.w2 writes w2 back, but it is not streamed",
    ),
    "a host-streamed weight that is also sent": (
        "host_streamed",
        lambda p: with_more(p, offload("w2", "update_1", None)),
        "offload.w2 copies w2, which is on the host",
    ),
    "a state fetched for an update on the host": (
        "host_update",
        lambda p: with_more(p, fetch("m1", "norm", None)),
        "fetch.m1 fetches m1, which the placement does not have on the host",
    ),
    "a copy on the host that nobody reads": (
        "nothing_moves",
        lambda p: with_plenty(with_more(p, offload("g1", "update_0", None))),
        "nothing reads g1",
    ),
}
