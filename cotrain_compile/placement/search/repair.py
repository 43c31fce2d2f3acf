"""Repair: a placement that is too large for the device, with as little more offloaded as does.

In: a Problem, a placement with what it moves, and the least one of the same step. Out: a placement
between the two, with what that moves.
At the op at which most is missing, the smallest tensor that is enough leaves, and with the least
placement everything has left that can: what fits there ends in a repair that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import owners
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.search.cover import with_all_offloaded
from cotrain_compile.placement.search.infeasible import Least
from cotrain_compile.plan import Placement, UpdateMode

Bytes = NDArray[np.int64]


def repaired(
    problem: Problem,
    placement: Placement,
    moves: Moves,
    least: Callable[[], Least],
    budget_bytes: int,
) -> tuple[Placement, Moves]:
    """`placement` with so much offloaded that `budget_bytes` is the most alive, and its moves.

    Every move is thought to be at the last moment. Unchanged where it fits; as near as it gets to
    that where `least` does not fit, which is asked for only where parameters have to change.
    """
    dataflow = moves.program.dataflow
    may_leave = set(with_all_offloaded(problem, placement).offloaded).difference(owners(dataflow))
    while True:
        used = np.array(moves.slot_bytes)
        if used.max() <= budget_bytes:
            return placement, moves
        # What updates alone read that have gone to the host is not on the device any more.
        movable = may_leave.intersection(moves.program.touches).difference(placement.offloaded)
        offloaded = _temporaries(moves, movable, used, budget_bytes)
        placement = replace(placement, offloaded=(*placement.offloaded, *offloaded))
        slot = int(used.argmax())
        if (short := int(used[slot]) - budget_bytes) > 0:
            before = placement
            placement = _without_params(dataflow, placement, moves, least(), slot, short)
            if placement == before:
                return placement, moves_of(problem, placement)
        moves = moves_of(problem, placement)


def _without_params(
    dataflow: Dataflow, placement: Placement, moves: Moves, least: Least, slot: int, short: int
) -> Placement:
    """`placement` with so many parameters as in the least one that `slot` has `short` bytes less.

    Where that is not enough, states that are too small to be streamed are: at the least itself not
    one step counter may rest on the device, and no update would be left there for that. Where not
    even that is, all are as in the least one.
    """
    params, counters = owners(dataflow), _counters(dataflow, placement)
    owned = {name: param for name, param in params.items() if name not in counters}
    freed = _freed(moves, least.moves, slot, owned)
    left = short - sum(freed.values())
    if left > sum(counters.values()):
        return _as_in_least(placement, least, params, params.values())
    placement = _as_in_least(placement, least, params, _enough(freed, short))
    streamed = dict.fromkeys(_enough(counters, left), Tier.HOST)
    return replace(placement, homes={**placement.homes, **streamed})


def _temporaries(moves: Moves, movable: set[str], used: Bytes, budget_bytes: int) -> list[str]:
    """Those of `movable` to offload until they free nothing where most is missing.

    One in whose place smaller ones do together comes back. `used` are the bytes in each slot, less
    what leaves.
    """
    program = moves.program
    gaps = {
        held.buffer.name: (*gap, held.buffer.nbytes)
        for held in moves.instances
        if held.buffer.name in movable
        and (gap := program.order.longest_gap(program.touches[held.buffer.name])) is not None
    }
    if not gaps:
        return []
    names = [*gaps]
    gap_of = np.array([*gaps.values()])
    stays = np.ones(len(names), dtype=bool)
    chosen = _leaving(gap_of, stays, used, budget_bytes)
    for number in sorted(chosen, key=lambda number: -gap_of[number, 2]):
        leaves, returns, nbytes = gap_of[number]
        back = used.copy()
        back[leaves + 1 : returns] += nbytes
        without = stays.copy()
        others = _leaving(gap_of, without, back, budget_bytes)
        if back.max() <= budget_bytes and gap_of[others, 2].sum() < nbytes:
            used[:], stays = back, without
            stays[number] = True
    return [name for name, stay in zip(names, stays, strict=True) if not stay]


def _leaving(gap_of: Bytes, stays: NDArray[np.bool_], used: Bytes, budget_bytes: int) -> list[int]:
    """What leaves of those that stay, where most is missing, the smallest that is enough first.

    By number in `gap_of`, whose rows are the slots between which it is offloaded, and its bytes.
    `stays` and `used` are changed accordingly.
    """
    leaves, returns, nbytes = gap_of.T
    chosen = list[int]()
    while (short := int(used.max()) - budget_bytes) > 0:
        slot = int(used.argmax())
        (there,) = np.nonzero(stays & (leaves < slot) & (slot < returns))
        if not len(there):
            break
        enough = there[nbytes[there] >= short]
        best = enough[nbytes[enough].argmin()] if len(enough) else there[nbytes[there].argmax()]
        used[leaves[best] + 1 : returns[best]] -= nbytes[best]
        stays[best] = False
        chosen.append(int(best))
    return chosen


def _counters(dataflow: Dataflow, placement: Placement) -> dict[str, int]:
    """Bytes of each state that rests on the device though its parameter's others are streamed."""
    return {
        state: dataflow.buffer[state].nbytes
        for group in dataflow.updates
        for state in group.states
        if placement.updates[group.param] is UpdateMode.STREAMED
        and placement.homes[state] is Tier.DEVICE
    }


def _freed(moves: Moves, least: Moves, slot: int, params: Mapping[str, str]) -> dict[str, int]:
    """What each parameter has in a slot that it has not there in the least placement."""
    there = _held(moves, slot, params)
    program = moves.program
    at = least.program.slot.get(program.ops[slot].name) if slot < program.end else None
    kept = _held(least, least.program.end if slot == program.end else at, params)
    freed = there - kept
    return {param: nbytes for param, nbytes in freed.items() if nbytes > 0}


def _held(moves: Moves, slot: int | None, params: Mapping[str, str]) -> Counter[str]:
    """Bytes of each parameter and what belongs to it in a slot; nothing in none."""
    held: Counter[str] = Counter()
    for each in moves.instances if slot is not None else ():
        if slot is not None and each.first <= slot < each.last and each.buffer.name in params:
            held[params[each.buffer.name]] += each.buffer.nbytes
    return held


def _enough(freed: Mapping[str, int], short: int) -> list[str]:
    """So few of the largest that they free what is `short`, the last one as small as does."""
    chosen: list[str] = []
    left = dict(freed)
    while short > 0 and left:
        enough = {name: nbytes for name, nbytes in left.items() if nbytes >= short}
        best = min(enough, key=enough.__getitem__) if enough else max(left, key=left.__getitem__)
        chosen.append(best)
        short -= left.pop(best)
    return chosen


def _as_in_least(
    placement: Placement, least: Least, params: Mapping[str, str], leaving: Iterable[str]
) -> Placement:
    """`placement` with the parameters that leave kept and updated as in the least one."""
    chosen, wanted = set(leaving), least.placement
    owned = {name for name, param in params.items() if param in chosen}
    offloaded = [name for name in placement.offloaded if name not in owned]
    return replace(
        placement,
        homes={n: wanted.homes[n] if n in owned else tier for n, tier in placement.homes.items()},
        updates={
            n: wanted.updates[n] if n in chosen else mode for n, mode in placement.updates.items()
        },
        offloaded=(*offloaded, *(name for name in wanted.offloaded if name in owned)),
        speculative=(
            *(name for name in placement.speculative if name not in chosen),
            *(name for name in wanted.speculative if name in chosen),
        ),
    )
