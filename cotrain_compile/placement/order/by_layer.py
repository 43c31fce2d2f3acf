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

Micro-batches: for which of them each op of a step works, and in which layer of the model.

In: a Dataflow. Out: `MicroBatches`, or `OrderIsKept` with the reason why the step has none. They
are found by structure: a forward through numbered modules, then a backward, and the same again.
What comes before the first layer counts as part of it, what follows the last one as part of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isqrt

from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.errors import PlanError
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


# Levels of numbered modules that are tried, from the outermost inwards.
_DEPTHS = 3


class OrderIsKept(Exception):
    """A step whose ops run in the order that it has; the message is the reason, in words."""


@dataclass(frozen=True)
class Turn:
    """What one op works for: a micro-batch and a layer, both by number, in forward or backward."""

    micro_batch: int
    layer: int
    is_backward: bool


@dataclass(frozen=True)
class MicroBatches:
    """`count` passes through `layers`. `turns` is by position of the op; None is what follows."""

    layers: tuple[str, ...]
    count: int
    turns: tuple[Turn | None, ...]


def find_micro_batches(dataflow: Dataflow) -> MicroBatches:
    """The micro-batches of a step; raises `OrderIsKept` where it has not at least two."""
    for depth in range(1, _DEPTHS + 1):
        layers = _layers(dataflow, depth)
        rounds = list(_rounds(dataflow, layers))
        if len(rounds) < 2 and depth == 1:
            raise OrderIsKept("the step has one micro-batch, or no numbered modules")
        if len(rounds) < 2:
            break
        visited = [_visited(round_, layers) for round_ in rounds]
        if any(names != visited[0] for names in visited):
            raise OrderIsKept(
                "its passes go through other layers each: they are no micro-batches of one model"
            )
        if len(visited[0]) > 1:
            turns = _turns(dataflow, rounds, layers, visited[0])
            return MicroBatches(visited[0], len(rounds), turns)
    raise OrderIsKept("the model has a single layer")


@dataclass(frozen=True)
class _Round:
    """Positions of the ops of a pass: its forward, and its backward."""

    forward: range
    backward: range


def _layers(dataflow: Dataflow, depth: int) -> list[str]:
    """The layer whose module called each op, or that uses the parameter it reads; "" for none.

    A backward knows no modules. A parameter is of the layer that the forward first uses it in, as
    is its low-precision copy; where the forward knows no modules either, of that in its name.
    """
    used_in = {b.name: _numbered(b.name, depth) for b in dataflow.buffers if b.role is Role.PARAM}
    used_in |= {g.low_precision: used_in[g.param] for g in dataflow.updates if g.low_precision}
    for op in reversed(dataflow.ops):
        if op.module and op.phase is Phase.FORWARD and op.writes:
            used_in |= {name: _numbered(op.module, depth) for name in op.reads if name in used_in}
    found = []
    for op in dataflow.ops:
        read = [used_in[name] for name in op.reads if name in used_in and op.writes]
        of_params = next((name for name in reversed(read) if name), "")
        found.append(_numbered(op.module, depth) if op.module else of_params)
    return found


def _numbered(path: str, depth: int) -> str:
    """`path` up to its `depth`-th number; "" where it has fewer."""
    parts = path.split(".")
    ends = [position for position, part in enumerate(parts, 1) if part.isdigit()]
    return ".".join(parts[: ends[depth - 1]]) if len(ends) >= depth else ""


def _rounds(dataflow: Dataflow, layers: Sequence[str]) -> Iterator[_Round]:
    """Each forward through layers with the backward that follows it.

    What lies between two of them, a sum of losses or the way to the first layer, begins the second.
    """
    start, backward, last = 0, 0, -1  # of this round: first op, first and last of its backward
    in_layers = False
    for position, op in enumerate(dataflow.ops):
        if op.phase is Phase.BACKWARD and in_layers:
            backward = position if last < start else backward
            last = position
        elif op.phase is Phase.FORWARD and layers[position] and op.writes:
            if last >= start:
                yield _Round(range(start, backward), range(backward, last + 1))
                start = last + 1
            in_layers = True
    if last >= start:
        yield _Round(range(start, backward), range(backward, last + 1))


def _visited(round_: _Round, layers: Sequence[str]) -> tuple[str, ...]:
    """The layers of a forward, in the order in which it comes to them."""
    return tuple(dict.fromkeys(layers[at] for at in round_.forward if layers[at]))


def _turns(
    dataflow: Dataflow, rounds: Sequence[_Round], layers: Sequence[str], visited: Sequence[str]
) -> tuple[Turn | None, ...]:
    """The turn of each op. Within a pass layers only rise in the forward, and fall in the backward,
    so that the ops of a micro-batch stay in their order."""
    number = {name: index for index, name in enumerate(visited)}
    turns: list[Turn | None] = [None] * len(dataflow.ops)
    for micro_batch, round_ in enumerate(rounds):
        current = 0
        for at in round_.forward:
            current = max(current, number.get(layers[at], 0))
            turns[at] = Turn(micro_batch, current, is_backward=False)
        for at in round_.backward:
            current = min(current, number.get(layers[at], current))
            turns[at] = Turn(micro_batch, current, is_backward=True)
    return tuple(turns)
