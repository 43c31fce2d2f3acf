"""Least: the placement in which everything leaves the device that can, and what it needs there.

Whatever else is decided, each buffer is on the device in the slots in which it is there too, so no
placement needs less: this is the least device budget. It depends on the step alone, as far as the
gaps do, and on no machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.placed import place
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import gaps_away, owners
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.schedule.schedule import shortfall_bytes
from cotrain_compile.placement.search.greedy import least_memory
from cotrain_compile.plan import Placement


@dataclass(frozen=True)
class Least:
    """A placement with what it moves and the device bytes that it needs.

    Of its temporaries `away_bytes` are away.
    """

    placement: Placement
    moves: Moves
    nbytes: int
    away_bytes: int


def least_of(problem: Problem) -> Least:
    """What needs least of the device; what `problem` makes again is given.

    What may be away is looked for op by op: longer buckets hide gaps.
    """
    space = decision_space(problem, None, everything=True)
    placement = space.placement("auto", least_memory(space))
    program = place(problem, placement).program
    owned = owners(program.dataflow)
    passing = (name for name in placement.away if name not in owned)
    again = tuple(name for name in passing if len(gaps_away(program, name, again=True)) > 1)
    placement = replace(placement, refetched=again)
    moves = moves_of(problem, placement)
    nbytes = shortfall_bytes(problem.with_budget(Tier.DEVICE, 0), moves)
    away_bytes = sum(decision.cluster.nbytes for decision in space.activations)
    return Least(placement, moves, nbytes, away_bytes)
