"""Broken orders: sound plans spoiled so that something happens too early, too late or nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cotrain_compile.machine import Tier
from cotrain_compile.plan import MovedOps
from tests.support.plans.broken_plans import (
    Breaking,
    with_early_update,
    with_home,
    with_mode,
    with_placement,
    with_plenty,
    with_task,
    without,
)
from tests.support.plans.sound_plans import RESIDENT

# Plan, how it is broken, what the refusal says.
BROKEN_ORDERS: Mapping[str, tuple[str, Breaking, str]] = {
    # Places.
    "a wait before the issue": (
        "host_update",
        lambda p: with_task(p, "offload.g1", wait_before="forward_1"),
        "offload.g1 is waited for before its issue",
    ),
    "a wait at an op that is not there": (
        "host_update",
        lambda p: with_task(p, "offload.g1", wait_before="nowhere"),
        "offload.g1 names nowhere, which the device does not run",
    ),
    "an issue at an op that the host runs": (
        "host_update",
        lambda p: with_task(p, "back.w1", issue_after="update_1"),
        "back.w1 names update_1, which the device does not run",
    ),
    "a task listed too late": (
        "host_update",
        lambda p: replace(p, tasks=(*p.tasks[1:], p.tasks[0])),
        "offload.w1 is listed after a task that is issued later",
    ),
    "a task that comes after one issued later": (
        "activation_offloaded",
        lambda p: with_task(p, "offload.h0", after=("fetch.h0",)),
        "offload.h0 is issued before fetch.h0, its `after`",
    ),
    "a task that comes after one that is not there": (
        "activation_offloaded",
        lambda p: with_task(p, "fetch.h0", after=("offload.h1",)),
        "fetch.h0 is issued before offload.h1, its `after`",
    ),
    "an op moved twice": (
        "updates_run_early",
        lambda p: replace(p, moved=(*p.moved, p.moved[0])),
        "an op is moved twice",
    ),
    "an op moved that is not there": (
        "updates_run_early",
        lambda p: replace(p, moved=(MovedOps(("update_9",), "loss"),)),
        "update_9 is moved, which the step has not",
    ),
    "an op moved that the host runs": (
        "host_streamed",
        lambda p: replace(p, moved=(MovedOps(("update_2",), "backward_2"),)),
        "update_2 is moved, but it runs on the host",
    ),
    "an op moved behind one that moves": (
        "updates_run_early",
        lambda p: replace(p, moved=(p.moved[0], MovedOps(("update_1",), "update_2"))),
        "moved behind update_2, which is not at its place",
    ),
    # The order of things: true, anti and output dependences.
    "an update before its gradient": (
        "updates_run_early",
        lambda p: replace(p, moved=(MovedOps(("update_2",), "loss"),)),
        "update_2 touches g2, which is not on the device",
    ),
    "an update before the last reader of the old weight": (
        "host_update",
        lambda p: replace(
            with_mode(with_home(replace(p, tasks=()), "m1", Tier.DEVICE), "w1", RESIDENT),
            moved=(MovedOps(("update_1",), "backward_1"),),
        ),
        "reread needs w1 as the step found it, but finds it on the device as update_1 left it",
    ),
    "ops of an update in the wrong order": (
        "streamed_low_precision",
        lambda p: replace(p, moved=(MovedOps(("update_1", "cast_g_1"), "backward_1"),)),
        "update_1 touches g32_1, which is not on the device",
    ),
    "an update before the clip scalar": (
        "host_update_with_a_clip_scalar",
        lambda p: without(p, "offload.coef"),
        "update.w2 needs coef on the host, where no task has sent it",
    ),
    "an update that does not wait for the clip scalar": (
        "host_update_with_a_clip_scalar",
        lambda p: with_task(p, "update.w2", after=("offload.w2", "offload.g2")),
        "update.w2 may read coef where offload.coef leaves it on the host before offload.coef is",
    ),
    "an update that does not wait for its gradient": (
        "host_streamed",
        lambda p: with_task(p, "update.w2", after=()),
        "update.w2 may read g2 where offload.g2 leaves it on the host before offload.g2 is done",
    ),
    "an update whose gradient is not sent": (
        "host_streamed",
        lambda p: without(p, "offload.g2"),
        "update.w2 needs g2 on the host, where no task has sent it",
    ),
    "an update whose parameter is not sent": (
        "host_update",
        lambda p: without(p, "offload.w1"),
        "update.w1 needs w1 on the host",
    ),
    "a gradient sent before it is there": (
        "host_update",
        lambda p: with_task(p, "offload.g1", issue_after="backward_2"),
        "offload.g1 copies g1 before it is on the device",
    ),
    "a weight that does not come back": (
        "host_update",
        lambda p: with_plenty(without(p, "back.w1")),
        "norm needs w1 as update_1 left it, but finds it on the device as the step found it",
    ),
    "a weight that does not come back and that nobody reads": (
        "host_update_with_a_clip_scalar",
        lambda p: without(p, "back.w2"),
        "what comes after the step needs w2 as update_2 left it",
    ),
    "a weight that comes back before its update": (
        "host_update",
        lambda p: with_task(p, "back.w1", after=("offload.w1",)),
        "back.w1 may read w1 where offload.w1 leaves it on the host before update.w1 is done",
    ),
    "a new weight read before it is back": (
        "host_update",
        lambda p: with_plenty(with_task(p, "back.w1", wait_before=None)),
        "norm may read w1 on the device before back.w1 is done with it",
    ),
    "an old weight overwritten while it is read": (
        "host_update",
        lambda p: with_plenty(
            with_task(
                with_task(p, "update.w1", issue_after="backward_1"),
                "back.w1",
                issue_after="backward_1",
            )
        ),
        "reread may read w1 on the device before back.w1 is done with it",
    ),
    "an old weight overwritten while it is sent": (
        "streamed_states",
        lambda p: with_task(p, "store.m2", issue_after="backward_2"),
        "store.m2 copies m2 before it is on the device",
    ),
    "a state that is not fetched": (
        "streamed_states",
        lambda p: without(p, "fetch.m1"),
        "update_1 touches m1, which is not on the device",
    ),
    "a state that arrives after its update": (
        "streamed_states",
        lambda p: with_task(p, "fetch.m1", wait_before=None),
        "update_1 touches m1, which is not on the device",
    ),
    "a state that is not written back": (
        "streamed_states",
        lambda p: without(p, "store.m2"),
        "needs m2 as update_2 left it, but finds it at its home on the host as the step found it",
    ),
    "a weight written back before its update": (
        "streamed_weight",
        lambda p: with_task(p, "store.w0", issue_after="backward_0", wait_before="update_0"),
        "needs w0 as update_0 left it, but finds it at its home on the host as the step found it",
    ),
    "a weight updated while it is written back": (
        "streamed_weight",
        lambda p: with_task(p, "store.w0", issue_after="backward_0"),
        "update_0 may overwrite w0 where refetch.w0 brings it on the device before store.w0 is",
    ),
    "a low-precision copy fetched before it is made": (
        "host_streamed_low_precision",
        lambda p: with_task(p, "fetch.p16_0", after=()),
        "fetch.p16_0 may read p16_0 where cast.p32_0 leaves it on the host before cast.p32_0 is",
    ),
    "a low-precision copy that nobody makes": (
        "host_streamed_low_precision",
        lambda p: with_placement(without(p, "cast.p32_0", "refetch.p16_0"), offloaded=()),
        "fetches p16_0, which the placement does not have on the host",
    ),
    "a home that is overwritten while it is fetched": (
        "host_streamed_read_late",
        lambda p: with_task(p, "update.w1", after=("offload.g1",)),
        "update.w1 may overwrite w1 at its home on the host before refetch.w1 is done with it",
    ),
    "a home that is fetched while it is overwritten": (
        "host_streamed_read_late",
        lambda p: with_early_update(p, "update.w1"),
        "refetch.w1 may read w1 at its home on the host before update.w1 is done with it",
    ),
    "a home that is fetched after its update": (
        "host_streamed_read_late",
        lambda p: with_task(with_early_update(p, "update.w1"), "refetch.w1", after=("update.w1",)),
        "reread needs w1 as the step found it, but finds it where refetch.w1 brings it",
    ),
    "an activation fetched before it is sent": (
        "activation_offloaded",
        lambda p: with_task(
            replace(p, tasks=p.tasks[::-1]), "fetch.h0", issue_after="forward_0", after=()
        ),
        "fetch.h0 finds no h0 on the host",
    ),
    "an activation fetched while it is sent": (
        "activation_offloaded",
        lambda p: with_plenty(
            with_task(with_task(p, "offload.h0", wait_before="backward_0"), "fetch.h0", after=())
        ),
        "fetch.h0 may read h0 where offload.h0 leaves it on the host before offload.h0 is done",
    ),
    "a wait that comes too late for the budget": (
        "host_streamed",
        lambda p: with_task(p, "offload.g2", wait_before=None),
        "bytes on the device at backward_0, budget",
    ),
    "a frozen weight that is not fetched": (
        "frozen_weight",
        lambda p: with_placement(replace(p, tasks=()), offloaded=()),
        "forward_0 touches w0, which is not on the device",
    ),
}
