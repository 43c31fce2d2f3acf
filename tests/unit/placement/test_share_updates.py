"""Shares of updates: some of those on the host are streamed instead, and what results is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import coarse, fraction, resident, streamed, zero_offload
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import draft, schedule
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.improve import share_updates
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.share_updates import (
    balanced_share,
    hosted_updates,
    with_share_streamed,
)
from cotrain_compile.plan import Placement, UpdateMode
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step

PLENTY = 1 << 62
LAYERS = 4
STEPS = {"chain": chain(LAYERS, width=256), "mixed": mixed_precision_step(LAYERS)}


def with_gradients_kept(dataflow: Dataflow) -> Dataflow:
    """`dataflow` after which every gradient is in the `.grad` of its parameter."""
    param = {group.gradient: group.param for group in dataflow.updates}
    buffers = (
        replace(b, role=Role.GRADIENT, is_output=True, param=param[b.name])
        if b.name in param
        else b
        for b in dataflow.buffers
    )
    return replace(dataflow, buffers=tuple(buffers))


def problem_of(dataflow: Dataflow) -> Problem:
    return formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("rule", [partial(fraction, share=1.0), coarse, zero_offload])
@pytest.mark.parametrize("kept", [False, True], ids=["passing", "kept"])
@pytest.mark.parametrize("name", STEPS)
def test_whatever_share_is_streamed_the_plan_is_sound(
    name: str, kept: bool, rule: Callable[[Dataflow], Placement], share: float
) -> None:
    """A gradient that is kept has a home; one that passes is offloaded in the first of two plans.

    It stays where its weight is fetched a single time, as for masters on the host.
    """
    dataflow = with_gradients_kept(STEPS[name]) if kept else STEPS[name]
    problem = problem_of(dataflow)
    placement = rule(dataflow)
    gradients = {group.gradient for group in dataflow.updates}
    tried = [shared for shared, _ in with_share_streamed(problem, placement, share)]
    offloaded, stays = (gradients.intersection(shared.offloaded) for shared in tried)
    assert UpdateMode.STREAMED in tried[0].updates.values()
    assert bool(offloaded) is not (kept or rule is zero_offload)
    assert not stays
    for shared in tried:
        check(problem, schedule(problem, shared))


def test_the_balanced_share_is_none_where_the_host_updates_nothing() -> None:
    problem = problem_of(STEPS["chain"])
    assert 0.0 < balanced_share(problem, zero_offload(problem.dataflow)) < 1.0
    assert not balanced_share(problem, resident(problem.dataflow))


def test_where_streamed_updates_leave_no_room_other_values_leave_too() -> None:
    """By a byte, which no update gives back that is left to the host."""
    problem = problem_of(STEPS["chain"])
    placement = zero_offload(problem.dataflow)
    tight = problem.with_budget(Tier.DEVICE, max(moves_of(problem, placement).slot_bytes) - 1)
    (shared, moves), *_ = with_share_streamed(tight, placement, 1.0)
    assert list(shared.updates.values()).count(UpdateMode.STREAMED) == LAYERS
    assert shared.offloaded
    assert max(moves.slot_bytes) <= tight.budgets[Tier.DEVICE]


def test_an_update_comes_after_all_that_reads_a_gradient_which_is_offloaded() -> None:
    """Also after what only looks at it: it comes back for its update when it has left."""
    step = STEPS["chain"]
    looks = tuple(
        Op(f"look_{i}", "view", Phase.BACKWARD, (f"g{i}",), (), 0, 0) for i in range(LAYERS)
    )
    first = next(at for at, op in enumerate(step.ops) if op.phase is Phase.OPTIMIZER)
    problem = problem_of(replace(step, ops=(*step.ops[:first], *looks, *step.ops[first:])))
    (offloaded, _), _ = with_share_streamed(problem, coarse(problem.dataflow), 1.0)
    moves = moves_of(problem, offloaded)
    ready = {send.name: send.ready for send in moves.sends}
    awaited = [
        (ready[name], update.earliest)
        for update in moves.device_updates
        for fetch in update.fetches
        for name in fetch.after
    ]
    assert len(awaited) == LAYERS
    assert all(leaves <= earliest for leaves, earliest in awaited)
    check(problem, schedule(problem, offloaded))


def test_what_holds_too_much_where_the_device_is_full_is_left_to_the_host() -> None:
    """With a byte less than all of them need one is, and the others fit."""
    problem = problem_of(mixed_precision_step(LAYERS, params=100))
    placement = zero_offload(problem.dataflow)
    _, every = next(with_share_streamed(problem, placement, 1.0))
    tight = problem.with_budget(Tier.DEVICE, max(every.slot_bytes) - 1)
    fewer, moves = next(with_share_streamed(tight, placement, 1.0))
    assert list(fewer.updates.values()).count(UpdateMode.STREAMED) == LAYERS - 1
    assert max(moves.slot_bytes) < max(every.slot_bytes)


def test_a_slower_plan_that_waits_for_the_host_is_the_fastest_with_its_share_streamed() -> None:
    """While the fastest has no update on the host, so that it has no share to stream."""
    step = chain(6, width=2048, batch=4096)
    problem = formulate(step, find("gh200"), dict.fromkeys(MEMORIES, PLENTY))
    attempts = Attempts(problem, SolveSettings(), lambda stage: None)
    for name, placement in {"streamed": streamed(step), "coarse": coarse(step)}.items():
        attempts.found.keep(name, draft(problem, placement))
    before = attempts.found.fastest
    assert before is not None
    assert not hosted_updates(problem, before.placement)
    share_updates(attempts)
    after = attempts.found.fastest
    assert after is not None
    assert after.step_s < before.step_s
    assert after.placement.policy == "coarse"
    assert UpdateMode.STREAMED in after.placement.updates.values()
