"""Share gathers: the fastest plan with a share of what it gathers again on the host meanwhile.

In: the attempts so far. Out: what is faster is found there, too.

A sharded parameter that has no room between forward and backward can be gathered again or can
leave: one takes the network, the other both ways of the host's link. Levels gather again what they
do not keep, and a greedy sees bytes at the peak, of which both free the same. Here the link gets
the share with which it takes as long as the network, then less, and the schedule is the judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import gathered
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.list_scheduler import Tactics
from cotrain_compile.placement.search.attempts import LATE, Attempts
from cotrain_compile.placement.work import PER_OP_OF_MOVES
from cotrain_compile.plan import Placement

# What comes back early is in the way of gradients that wait for the network.
TACTICS = (Tactics(lookahead=0.05), LATE)
# Of the balanced share.
PARTS = (1.0, 0.75, 0.5)
# A part of the step that is not worth a try.
LITTLE = 0.02


def share_gathers(attempts: Attempts) -> None:
    """Let gathered parameters leave instead of being gathered again, as long as that is faster."""
    fastest = attempts.found.fastest
    if fastest is None or fastest.placement.overlap_steps:
        return
    placement, problem = fastest.placement, attempts.problem
    alone = set(placement.recomputed).difference(placement.recomputed_apart)
    again = [name for name in gathered(problem.dataflow) if name in alone]
    share, gain_s = balanced_share(problem, again)
    if gain_s < LITTLE * fastest.step_s:
        return
    for part in PARTS:
        if attempts.is_late or not _try_share(attempts, placement, again, part * share):
            return


def balanced_share(problem: Problem, again: Sequence[str]) -> tuple[float, float]:
    """The share of `again` with which the link takes as long as the network, and what it saves.

    Seconds of the network alone. Both are 0 where nothing is gathered again.
    """
    ops, costs, machine = gathered(problem.dataflow), problem.costs, problem.machine
    nbytes = sum(problem.dataflow.buffer[name].nbytes for name in again)
    again_s = sum(costs.network_s.get(ops[name].name, 0.0) for name in again)
    link_s = max(nbytes / link.bytes_per_s for link in (machine.h2d, machine.d2h))
    network_s = sum(costs.network_s.values()) + again_s
    share = min(1.0, network_s / (again_s + link_s)) if again_s else 0.0
    return share, share * again_s


def _try_share(
    attempts: Attempts, placement: Placement, again: Sequence[str], share: float
) -> bool:
    """Whether a plan in which this share leaves is the fastest yet."""
    before = attempts.found.fastest
    attempts.progress(f"trying {share:.0%} of the gathered parameters on the host")
    leaving = [name for k, name in enumerate(again, 1) if int(k * share) > int((k - 1) * share)]
    kept = replace(
        placement,
        recomputed=tuple(name for name in placement.recomputed if name not in leaving),
        offloaded=(*placement.offloaded, *leaving),
    )
    problem = attempts.problem.under(kept)
    attempts.meter.charge(PER_OP_OF_MOVES * len(problem.dataflow.ops))
    moves = moves_of(problem, kept)
    if max(moves.slot_bytes) <= problem.budgets[Tier.DEVICE]:
        for tactics in TACTICS:
            with suppress(PlacementError):
                found = attempts.drafted(problem, kept, moves, tactics)
                attempts.found.keep(kept.policy, found)
    return attempts.found.fastest is not before
