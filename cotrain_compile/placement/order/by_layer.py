"""By layer: the step in which a pack of layers runs for all micro-batches before the next pack.

In: a Dataflow and how many layers are a pack. Out: the same ops in another order (Harmony, VLDB
2022, on one device). Two micro-batches, packs A and B, forward f and backward b:

    as written   fA1 fB1 bB1 bA1 fA2 fB2 bB2 bA2
    by layer     fA1 fA2 fB1 bB1 fB2 bB2 bA1 bA2

So what a pack reads of its weights is read at two places of the step, however many micro-batches
there are, and the gradients of a pack are complete when its backward is. The last pack goes on with
its backward at once, as nothing is gained by waiting. Each op comes behind all that it depends on,
and so do random ops and exchanges, which read and write what keeps them in order: every sum has its
terms in the order that the step has, to the bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isqrt

from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.errors import PlanError
from cotrain_compile.placement.order.micro_batches import (
    MicroBatches,
    OrderIsKept,
    Turn,
    find_micro_batches,
)
from cotrain_compile.placement.remembered import remembered

_Key = tuple[float, int, int]


def by_layer(dataflow: Dataflow, layers_per_pack: int) -> Dataflow:
    """The step in packs of about so many layers, as even as they can be; as it is for 0.

    Raises `OrderIsKept` with the reason where the step has no such order.
    """
    if not layers_per_pack:
        return dataflow
    return _ordered(dataflow, layers_per_pack)


@remembered
def _ordered(dataflow: Dataflow, layers_per_pack: int) -> Dataflow:
    order = _order(dataflow, find_micro_batches(dataflow), layers_per_pack)
    return replace(dataflow, ops=tuple(dataflow.ops[position] for position in order))


def in_packs(dataflow: Dataflow, layers_per_pack: int) -> Dataflow:
    """The step in the order of a plan: as `by_layer`, with a `PlanError` where there is none."""
    try:
        return by_layer(dataflow, layers_per_pack)
    except OrderIsKept as reason:
        raise PlanError(
            f"the plan runs micro-batches in packs of {layers_per_pack} layers, which this step "
            f"does not allow: {reason}; make a new plan for it"
        ) from None


def pack_sizes(dataflow: Dataflow) -> tuple[int, ...]:
    """Sizes of packs worth a plan: one layer, the root of all, half of them. All is as written.

    Raises `OrderIsKept` with the reason where no order but the step's own is possible.
    """
    layers = len(find_micro_batches(dataflow).layers)
    sizes = sorted({1, isqrt(layers), (layers + 1) // 2})
    by_layer(dataflow, sizes[0])
    return tuple(sizes)


def _order(dataflow: Dataflow, found: MicroBatches, layers_per_pack: int) -> list[int]:
    """Positions of the ops in their new order.

    Among the ops that may run next the first by pack, micro-batch and place in the step does.
    """
    packs = -(-len(found.layers) // layers_per_pack)
    keys = [_key(turn, at, len(found.layers), packs) for at, turn in enumerate(found.turns)]
    before = _dependences(dataflow)
    behind: list[list[int]] = [[] for _ in before]
    missing = [len(others) for others in before]
    for position, others in enumerate(before):
        for other in others:
            behind[other].append(position)
    ready = [keys[position] for position, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        position = heapq.heappop(ready)[-1]
        order.append(position)
        for other in behind[position]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, keys[other])
    _require_packs(dataflow, found, keys, order, before)
    return order


def _key(turn: Turn | None, position: int, layers: int, packs: int) -> _Key:
    """What an op is sorted by: its pack, from 0 up and back down to 0, then its micro-batch."""
    if turn is None:
        return inf, 0, position
    pack = turn.layer * packs // layers
    return 2 * (packs - 1) - pack if turn.is_backward else pack, turn.micro_batch, position


def _dependences(dataflow: Dataflow) -> list[set[int]]:
    """By position, the ops that each must come behind: of any two that touch a buffer, unless both
    only read it, the second behind the first."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    found = []
    for position, op in enumerate(dataflow.ops):
        before = {writer[name] for name in (*op.reads, *op.writes) if name in writer}
        before.update(*(readers.get(name, ()) for name in op.writes))
        for name in op.writes:
            writer[name], readers[name] = position, []
        for name in op.reads:
            readers.setdefault(name, []).append(position)
        if op.awaits:
            before.add(dataflow.position[op.awaits])
        found.append(before - {position})
    return found


def _require_packs(
    dataflow: Dataflow,
    found: MicroBatches,
    keys: Sequence[_Key],
    order: Sequence[int],
    before: Sequence[set[int]],
) -> None:
    """Raise `OrderIsKept` unless all that reads a parameter in a pass is in the order of packs."""
    params = {b.name for b in dataflow.buffers if b.role is Role.PARAM}
    params |= {group.low_precision for group in dataflow.updates}
    last = -1
    for position in order:
        op = dataflow.ops[position]
        reads = op.phase is not Phase.OPTIMIZER and not params.isdisjoint(op.reads)
        if not reads or not op.writes or found.turns[position] is None:
            continue
        if last >= 0 and keys[position] < keys[last]:
            raise OrderIsKept(_reason(dataflow, found, keys, position, before))
        last = position


def _reason(
    dataflow: Dataflow,
    found: MicroBatches,
    keys: Sequence[_Key],
    position: int,
    before: Sequence[set[int]],
) -> str:
    """What the op at `position` has to wait for that should come behind it."""
    waiting, seen = [position], {position}
    while waiting:
        op = waiting.pop()
        for other in sorted(before[op], reverse=True):
            if keys[other] > keys[op]:
                return _in_words(dataflow, found, other, op)
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    raise AssertionError("an op is out of order, and nothing that it waits for is")


def _in_words(dataflow: Dataflow, found: MicroBatches, first: int, second: int) -> str:
    one, other = dataflow.ops[first], dataflow.ops[second]
    shared = ({*one.reads, *one.writes} & {*other.reads, *other.writes}) or {""}
    roles = {dataflow.buffer[name].role for name in shared if name}
    if Role.RNG in roles:
        why = "both draw random numbers, one after the other"
    elif Role.GROUP in roles:
        why = "both exchange with other ranks, one after the other"
    else:
        why = f"both touch {min(shared)}"
    return f"{other.name}{_of(found, second)} has to follow {one.name}{_of(found, first)}: {why}"


def _of(found: MicroBatches, position: int) -> str:
    turn = found.turns[position]
    if turn is None:
        return ""
    return f" of micro-batch {turn.micro_batch + 1} in {found.layers[turn.layer]}"
