"""Improve: the fastest plan of a search, scheduled in other ways and with little changed.

In: the attempts so far. Out: what is faster is found there, too. What changes is that moves up come
late, and that parameters with next to no bytes rest on the device with their states.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.list_scheduler import EAGER, Tactics
from cotrain_compile.placement.schedule.schedule import Draft
from cotrain_compile.placement.search.attempts import LATE, TACTICS, Attempts
from cotrain_compile.placement.search.cover import covered
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.share_updates import (
    balanced_share,
    hosted_s,
    with_share_streamed,
)
from cotrain_compile.placement.search.small_params import as_in, with_small_at_rest
from cotrain_compile.placement.work import PER_OP_OF_LEAST
from cotrain_compile.plan import Placement

# So long before their use, in parts of a step, moves up begin at the earliest.
LATE_STARTS = (EAGER, LATE, Tactics(lookahead=0.1))
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


def let_small_leave(attempts: Attempts) -> None:
    """The fastest plan with small parameters as in the one that needs least, if that is faster.

    Near the least memory, where covers lead, what they take may be worth more than is spared.
    """
    fastest, resting = attempts.found.fastest, attempts.problem.resting
    if fastest is None or not (resting and attempts.covers) or not _has_work_for_one(attempts):
        return
    problem = attempts.problem
    attempts.meter.charge(PER_OP_OF_LEAST * len(problem.dataflow.ops))
    least = least_of(replace(problem, resting=frozenset())).placement
    groups = [problem.dataflow.update[param] for param in resting]
    placement = as_in(fastest.placement, least, groups)
    placement, moves = covered(problem, placement, problem.budgets[Tier.DEVICE])
    with suppress(PlacementError):
        found = attempts.drafted(problem.under(placement), placement, moves, fastest.tactics)
        attempts.found.keep(placement.policy, found)


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
