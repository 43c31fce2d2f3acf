"""Improve: the fastest plan of a search, scheduled in other ways and with little changed.

In: the attempts so far. Out: what is faster is found there, too.
"""

from __future__ import annotations

from contextlib import suppress

from cotrain_compile.errors import PlacementError
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.list_scheduler import Tactics
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.small_at_rest import with_small_at_rest

# So long before their use, in parts of a step, moves up begin at the earliest.
LATE = (Tactics(lookahead=0.02), Tactics(lookahead=0.1))


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
        if not _has_time_for_one(attempts):
            return
        with suppress(PlacementError):
            found = attempts.drafted(problem, placement, moves, tactics)
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
        if not _has_time_for_one(attempts):
            return
        moves = moves_of(problem, calmer)
        with suppress(PlacementError):
            found = attempts.drafted(problem, calmer, moves, fastest.tactics)
            if found.step_s <= fastest.step_s:
                attempts.found.prefer(calmer.policy, found)
                return


def _has_time_for_one(attempts: Attempts) -> bool:
    """Whether there is work for one more schedule, and the timeline of the plan after it."""
    return attempts.work.left > 2 * attempts.draft_units
