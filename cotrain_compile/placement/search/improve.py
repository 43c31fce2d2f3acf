"""Improve: the fastest plan of a search, scheduled in other ways and with little changed.

In: the attempts so far. Out: what is faster is found there, too. What changes is that moves up come
late, and that parameters with next to no bytes rest on the device with their states: a copy of a
few KiB takes the link's latency and the interpreter's time, each way and for each state, and gives
next to no memory back (`docs/decisions/0039-small-tensors-stay.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from cotrain_compile.dataflow import Dataflow, UpdateGroup
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import smallest
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.list_scheduler import EAGER, Tactics
from cotrain_compile.placement.schedule.schedule import Draft
from cotrain_compile.placement.search.attempts import LATE, TACTICS, Attempts
from cotrain_compile.placement.search.cover import covered
from cotrain_compile.placement.search.share_updates import (
    balanced_share,
    hosted_s,
    with_share_streamed,
)
from cotrain_compile.plan import Placement, UpdateMode

# So long before their use, in parts of a step, moves up begin at the earliest.
LATE_STARTS = (EAGER, LATE, Tactics(lookahead=0.1))
# Where not all of them fit, the smaller ones of them may.
PARTS = (1, 2, 4, 8)
# A part of the step that is not worth a try.
LITTLE = 0.02
# How far from a share of streamed updates others are tried, one after the other.
SHARE_STEPS = (0.15, 0.07)


def fetch_late(attempts: Attempts) -> None:
    """The fastest placement with moves up not long before their use, if that is faster.

    The lane up may be better idle: what has come early is in the way of what has to leave.
    """
    fastest = attempts.found.fastest
    if fastest is None or not fastest.tasks or fastest.placement.overlap_steps:
        return
    placement = fastest.placement
    problem = attempts.problem.under(placement)
    moves = moves_of(problem, placement)
    for tactics in LATE_STARTS:
        if tactics == fastest.tactics:
            continue
        if not _has_work_for_one(attempts):
            return
        with suppress(PlacementError):
            found = attempts.drafted(problem, placement, moves, tactics)
            attempts.found.keep(placement.policy, found)


def cover_values(attempts: Attempts) -> None:
    """The fastest plan with its values offloaded by the exact profile, if that is faster."""
    fastest = attempts.found.fastest
    if fastest is None or not fastest.tasks or fastest.placement.overlap_steps:
        return
    problem, placement = attempts.problem.under(fastest.placement), fastest.placement
    if placement.policy.startswith("cover"):
        return
    placement, moves = covered(problem, placement, problem.budgets[Tier.DEVICE])
    if _has_work_for_one(attempts):
        with suppress(PlacementError):
            found = attempts.drafted(problem, placement, moves, fastest.tactics)
            attempts.found.keep(placement.policy, found)


def share_updates(attempts: Attempts, *, beside: bool = True) -> None:
    """The fastest plan with the share of what the host updates streamed that balances them.

    Before it the plan that is the fastest then, if all that the host does less is saved.
    """
    fastest = attempts.found.fastest
    if fastest is None or fastest.placement.overlap_steps:
        return
    waits = [d for d in attempts.found.drafts.values() if not d.placement.overlap_steps]
    promising = min(waits, key=lambda found: found.step_s - _Share.of(attempts, found).gain_s)
    for each in (promising, fastest)[promising is fastest :]:
        _share(attempts, each, beside)
        if attempts.found.fastest is not fastest:
            return


class _Share(NamedTuple):
    """A share of the updates on the host, and the seconds that it has less to do for it."""

    share: float
    gain_s: float

    @classmethod
    def of(cls, attempts: Attempts, found: Draft) -> _Share:
        """The share of `found` that balances host and link, whatever that makes again."""
        share = balanced_share(attempts.problem, found.placement)
        return cls(share, share * hosted_s(attempts.problem, found.placement))


def _share(attempts: Attempts, found: Draft, beside: bool) -> None:
    """Try `found` with its share streamed.

    From there to either side, in smaller and smaller steps, as long as that is faster, if what is
    `beside` that is to be tried.
    """
    problem, placement = attempts.problem.under(found.placement), found.placement
    share, gain_s = _Share.of(attempts, found)
    if gain_s < LITTLE * found.step_s or not _try_share(attempts, problem, placement, share):
        return
    for step in SHARE_STEPS if beside else ():
        for other in (share - step, share + step):
            if 0.0 < other <= 1.0 and _try_share(attempts, problem, placement, other):
                share = other
                break


def _try_share(attempts: Attempts, problem: Problem, placement: Placement, share: float) -> bool:
    """Whether a plan with this share streamed is the fastest yet."""
    before = attempts.found.fastest
    for shared, moves in with_share_streamed(problem, placement, share):
        if not _has_work_for_one(attempts):
            return False
        attempts.progress(f"trying {share:.0%} of the host's updates streamed")
        with suppress(PlacementError):
            for tactics in TACTICS:
                attempts.found.keep(
                    shared.policy, attempts.drafted(problem, shared, moves, tactics)
                )
            break  # with gradients offloaded it fits, and they are in nobody's way
    return attempts.found.fastest is not before


def let_small_rest(attempts: Attempts) -> None:
    """The fastest plan with small parameters where they compute, if it fits and is no slower.

    What is decided on is seldom so small, but clusters and roundings take small ones along.
    """
    fastest = attempts.found.fastest
    if fastest is None:
        return
    problem = attempts.problem.under(fastest.placement)
    for calmer in with_small_at_rest(problem.dataflow, fastest.placement):
        if not _has_work_for_one(attempts):
            return
        moves = moves_of(problem, calmer)
        with suppress(PlacementError):
            found = attempts.drafted(problem, calmer, moves, fastest.tactics)
            if found.step_s <= fastest.step_s:
                attempts.found.prefer(calmer.policy, found)
                return


def _has_work_for_one(attempts: Attempts) -> bool:
    """Whether there is work for one more schedule, and the timeline of the plan after it."""
    return attempts.work.left > 2 * attempts.draft_units


def with_small_at_rest(dataflow: Dataflow, placement: Placement) -> Iterator[Placement]:
    """Placements in which small parameters that move stay, the one with the most first."""
    sizes = {g.param: _nbytes(dataflow, g) for g in dataflow.updates}
    small = smallest(sizes)
    moving = [g for g in dataflow.updates if g.param in small and _moves(placement, g)]
    resting = sorted(moving, key=lambda group: sizes[group.param])
    for part in PARTS:
        if chosen := resting[: len(resting) // part]:
            yield _resting(placement, chosen)


def _moves(placement: Placement, group: UpdateGroup) -> bool:
    """Whether it is updated otherwise than on the device; a gradient at home elsewhere stays."""
    gradient_stays = placement.homes.get(group.gradient) is not Tier.HOST
    return gradient_stays and placement.updates[group.param] is not UpdateMode.RESIDENT


def _nbytes(dataflow: Dataflow, group: UpdateGroup) -> int:
    return sum(dataflow.buffer[name].nbytes for name in (group.param, *group.states))


def _resting(placement: Placement, groups: list[UpdateGroup]) -> Placement:
    names = {name for group in groups for name in (group.param, *group.states)}
    weights = names | {group.low_precision for group in groups if group.low_precision}
    return replace(
        placement,
        homes={**placement.homes, **dict.fromkeys(names, Tier.DEVICE)},
        updates={
            **placement.updates,
            **dict.fromkeys((group.param for group in groups), UpdateMode.RESIDENT),
        },
        offloaded=tuple(name for name in placement.offloaded if name not in weights),
    )
