"""Improve: the fastest plan of a search, scheduled in other ways and with little changed.

In: the attempts so far. Out: what is faster is found there, too.
"""

from __future__ import annotations

from contextlib import suppress

from cotrain_compile.errors import PlacementError
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.list_scheduler import Tactics
from cotrain_compile.placement.search.attempts import TACTICS, Attempts
from cotrain_compile.placement.search.share_updates import balanced_share, with_share_streamed
from cotrain_compile.placement.search.small_at_rest import with_small_at_rest
from cotrain_compile.plan import Placement

# So long before their use, in parts of a step, moves up begin at the earliest.
LATE = (Tactics(lookahead=0.02), Tactics(lookahead=0.1))
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
    for tactics in LATE:
        if not _has_work_for_one(attempts):
            return
        with suppress(PlacementError):
            found = attempts.drafted(problem, placement, moves, tactics)
            attempts.found.keep(placement.policy, found)


def share_updates(attempts: Attempts) -> None:
    """The fastest plan with shares of what the host updates streamed, about what balances them.

    From there to either side, in smaller and smaller steps, as long as that is faster.
    """
    fastest = attempts.found.fastest
    if fastest is None or fastest.placement.overlap_steps:
        return
    problem, placement = attempts.problem.under(fastest.placement), fastest.placement
    share = balanced_share(problem, placement)
    if not share or not _try_share(attempts, problem, placement, share):
        return
    for step in SHARE_STEPS:
        for beside in (share - step, share + step):
            if 0.0 < beside <= 1.0 and _try_share(attempts, problem, placement, beside):
                share = beside
                break


def _try_share(attempts: Attempts, problem: Problem, placement: Placement, share: float) -> bool:
    """Whether a plan with this share streamed is the fastest yet."""
    before = attempts.found.fastest
    for shared in with_share_streamed(problem, placement, share):
        if not _has_work_for_one(attempts):
            return False
        attempts.progress(f"trying {share:.0%} of the host's updates streamed")
        with suppress(PlacementError):
            moves = moves_of(problem, shared)
            for tactics in TACTICS:
                attempts.found.keep(
                    shared.policy, attempts.drafted(problem, shared, moves, tactics)
                )
            break  # with gradients away it fits, and they are in nobody's way
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
