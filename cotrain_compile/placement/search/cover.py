"""Cover: what leaves the device of the values that a step makes, chosen by the exact profile.

In: a Problem, and a placement that says how parameters are kept. Out: that placement with so few
values offloaded that it fits, each where it is offloaded for long.

At first all are offloaded that can be, and behind that once more. Then one gap after the other is
closed where the memory allows it at each op, first those that would need the fastest link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cotrain_compile.dataflow import Buffer, Dataflow, Role
from cotrain_compile.placement.placed import place
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.remembered import once
from cotrain_compile.placement.residency import DeviceProgram, owners
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.plan import Placement

# A value that is smaller than this part of the budget is not worth a copy, while others are.
SMALLEST = 1 / 10_000


class Gap(NamedTuple):
    """The slots between which a value is offloaded; `number` 0 is the first time, 1 the second."""

    name: str
    number: int
    leaves: int
    returns: int
    nbytes: int


def covered(problem: Problem, placement: Placement, budget_bytes: int) -> tuple[Placement, Moves]:
    """`placement` with other values offloaded, and its moves.

    They fit in `budget_bytes`, with each copy at the last moment, where anything does that has no
    tiny ones offloaded.
    """
    least_bytes = SMALLEST * budget_bytes
    problem = problem.under(placement)
    everything = with_all_offloaded(problem, placement, least_bytes)
    offloaded, again = set(everything.offloaded), set(everything.refetched)
    moves = moves_of(problem, everything)
    program, used = moves.program, np.array(moves.slot_bytes)

    def with_values() -> Placement:
        return replace(
            everything,
            offloaded=tuple(name for name in everything.offloaded if name in offloaded),
            refetched=tuple(name for name in everything.refetched if name in again),
        )

    owned = owners(program.dataflow)
    gaps = [*_gaps(problem, program, least_bytes)]
    gaps.sort(key=lambda gap: _seconds(program, gap) / gap.nbytes)
    for gap in (*gaps, *(gap for gap in gaps if not gap.number)):  # the first closes last
        is_open = (
            gap.name in again if gap.number else gap.name in offloaded and gap.name not in again
        )
        inside = slice(gap.leaves + 1, gap.returns)
        if is_open and used[inside].max(initial=0) + gap.nbytes <= budget_bytes:
            used[inside] += gap.nbytes
            (again if gap.number else offloaded).remove(gap.name)
    moves = moves_of(problem, with_values())
    # With others offloaded some op may be elsewhere, so that a value has no time left to be
    # offloaded in.
    while stay := {name for name in offloaded - owned.keys() if not _has_gap(moves.program, name)}:
        offloaded, again = offloaded - stay, again - stay
        moves = moves_of(problem, with_values())
    return with_values(), moves


def with_all_offloaded(
    problem: Problem, placement: Placement, least_bytes: float = 0.0
) -> Placement:
    """`placement` with all larger values offloaded that can be, and once more where they can."""
    program = place(problem, placement).program
    owned = owners(program.dataflow)
    gaps = [*_gaps(problem.under(placement), program, least_bytes)]
    offloaded = {gap.name for gap in gaps}
    again = {gap.name for gap in gaps if gap.number}
    others = (name for name in placement.offloaded if name in owned)
    values = [b.name for b in program.dataflow.buffers if b.name in offloaded]
    return replace(
        placement,
        offloaded=(*others, *values),
        refetched=tuple(name for name in values if name in again),
    )


def _has_gap(program: DeviceProgram, name: str) -> bool:
    return bool(program.order.offloaded_gaps(name))


def _gaps(problem: Problem, program: DeviceProgram, least_bytes: float) -> Iterator[Gap]:
    """The gaps in which values may be offloaded, of those that belong to no parameter.

    What is made again stays to its last use in the forward, as between the parts of a split op.
    """
    offloaded_gaps, again = program.order.offloaded_gaps, frozenset(problem.recomputed)
    for buffer in _values(program.dataflow):
        if buffer.nbytes > least_bytes and buffer.name not in again:
            for number, gap in enumerate(offloaded_gaps(buffer.name)):
                yield Gap(buffer.name, number, *gap, buffer.nbytes)


@once
def _values(dataflow: Dataflow) -> tuple[Buffer, ...]:
    """What the step makes for itself and that no parameter or update has to do with."""
    taken = owners(dataflow).keys() | {n for group in dataflow.updates for n in group.scalars}
    own = (b for b in dataflow.buffers if b.role is Role.TEMPORARY and b.is_passing)
    return tuple(buffer for buffer in own if buffer.name not in taken)


def _seconds(program: DeviceProgram, gap: Gap) -> float:
    """What the ops in it take, about."""
    return program.work[gap.returns] - program.work[gap.leaves + 1]
