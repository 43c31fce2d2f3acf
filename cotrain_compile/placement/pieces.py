"""Pieces: the step in which large updates on the device go piece by piece, as a Dataflow.

In: a Dataflow and a Placement that streams updates. Out: the Dataflow in which each large one runs
as several, one for each piece of its elements, on pieces of what is fetched for it: piece k comes
up while the one before is updated and the one before that goes home, and no more than the pieces
under way are on the device. Only where every element is updated by itself (`UpdateGroup.elements`),
so that nothing changes but the order of the work. Schedule, simulation and replay see nothing but
that step. The pass `update_in_pieces` does the same to the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Pieces, Role, UpdateGroup
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.remembered import remembered
from cotrain_compile.plan import Placement, UpdateMode

# Of the parameter. A link takes about a millisecond for it, so that what it takes to start a copy
# and the ops of a piece is a small part.
PIECE_BYTES = 32 << 20
# Pieces begin at multiples of so many elements, as vector units and lines of caches like it.
ALIGNED = 1024


class Piece(NamedTuple):
    """One piece of an update: its `ops`, and the pieces of buffers that they touch and write.

    `workspace_bytes` is the most that the values made inside take at once.
    """

    ops: tuple[str, ...]
    touched: tuple[str, ...]
    written: frozenset[str]
    workspace_bytes: int


@dataclass(frozen=True, eq=False)
class Pieced:
    """The update of `param` in pieces, each from one of the `bounds` to the next, in elements.

    Of the buffers `fetched` each piece has a piece of its own, called as `wholes` says; what else
    it touches lies on the device as a whole. In place of the ops `whole` there are `ops`, on
    `buffers` in place of those that are `made`. The numbers that the first piece makes and others
    read take `common_bytes`. It says the same of every order of the step, whatever is made again,
    and is one object for all: what is made again is nothing that an update reads.
    """

    param: str
    bounds: tuple[int, ...]
    fetched: frozenset[str]
    whole: tuple[Op, ...]
    made: frozenset[str]
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    wholes: Mapping[str, str]
    pieces: tuple[Piece, ...]
    common_bytes: int
    group: UpdateGroup


def piece_bounds(elements: int, nbytes: int, piece_bytes: int) -> tuple[int, ...]:
    """Where the pieces of a parameter of so many elements and bytes begin, and the end of all.

    All are alike but for the last, which is no smaller.
    """
    pieces = -(-nbytes // piece_bytes) if piece_bytes else 1
    each = elements // pieces // ALIGNED * ALIGNED
    if not each:
        return (0, elements)
    return (*(number * each for number in range(pieces)), elements)


def largest_piece(dataflow: Dataflow, group: UpdateGroup, piece_bytes: int) -> float:
    """The share of an update that its largest piece has; 1 where it goes as a whole."""
    if not may_go_in_pieces(dataflow, group):
        return 1.0
    nbytes = dataflow.buffer[group.param].nbytes
    *_, begin, end = piece_bounds(group.elements, nbytes, piece_bytes)
    return (end - begin) / group.elements


def may_go_in_pieces(dataflow: Dataflow, group: UpdateGroup) -> bool:
    """Whether all that the update is about is its own: a gradient kept in `.grad` is the user's."""
    gradient, param = dataflow.buffer[group.gradient], dataflow.buffer[group.param]
    return group.elements > 0 and gradient.is_passing and not param.is_output


def pieces_under(dataflow: Dataflow, placement: Placement) -> tuple[Pieced, ...]:
    """The updates that go in pieces under `placement`."""
    if not placement.piece_bytes:
        return ()
    return tuple(_pieces_under(dataflow, placement))


def _pieces_under(dataflow: Dataflow, placement: Placement) -> Iterator[Pieced]:
    offloaded, homes, used = (
        set(placement.offloaded),
        placement.homes,
        _used_outside(dataflow, None),
    )
    for group in dataflow.updates:
        streamed = placement.updates.get(group.param) is UpdateMode.STREAMED
        if not streamed or not may_go_in_pieces(dataflow, group):
            continue
        nbytes = dataflow.buffer[group.param].nbytes
        bounds = piece_bounds(group.elements, nbytes, placement.piece_bytes)
        fetched = {name for name in group.states if homes.get(name) is Tier.HOST}
        fetched |= {group.param} if homes.get(group.param) is Tier.HOST else set()
        fetched -= {group.param} & used
        fetched |= {group.gradient} & offloaded
        fetched = {n for n in fetched if dataflow.buffer[n].nbytes >= group.elements}
        if len(bounds) > 2 and fetched:
            yield _pieced(dataflow, (group.param, bounds, frozenset(fetched)))


@remembered
def _used_outside(dataflow: Dataflow, key: None) -> set[str]:
    """The parameters that ops outside their updates touch, but for making a narrower copy."""
    del key
    own = {name for group in dataflow.updates for name in group.ops}
    copies = {group.low_precision: group.param for group in dataflow.updates if group.low_precision}
    params = {group.param for group in dataflow.updates}
    return {
        name
        for op in dataflow.ops
        if op.name not in own
        for name in params.intersection((*op.reads, *op.writes))
        if not (op.reads == (name,) and any(copies.get(made) == name for made in op.writes))
    }


def piece_name(op: str, number: int) -> str:
    """The name of the op that does the work of `op` for one piece."""
    return f"{op}_piece_{number}"


def part_name(buffer: str, begin: int, end: int) -> str:
    """The name of some elements of `buffer`."""
    return f"{buffer}[{begin}:{end}]"


def by_element(dataflow: Dataflow, group: UpdateGroup) -> list[Op]:
    """The ops of `group` that work on all elements; the others on single numbers."""
    ops = (dataflow.ops[dataflow.position[name]] for name in group.ops)
    return [op for op in ops if any(_is_full(dataflow, group, n) for n in (*op.reads, *op.writes))]


def _is_full(dataflow: Dataflow, group: UpdateGroup, name: str) -> bool:
    """Whether a buffer that `group` touches has an element for each of the parameter's."""
    return dataflow.buffer[name].nbytes >= group.elements


def in_pieces(dataflow: Dataflow, pieces: tuple[Pieced, ...]) -> Dataflow:
    """The step in which these updates go in pieces; the fingerprint stays that of the step."""
    return _rewritten(dataflow, pieces) if pieces else dataflow


@remembered
def _rewritten(dataflow: Dataflow, pieces: tuple[Pieced, ...]) -> Dataflow:
    instead = {each.whole[-1].name: each.ops for each in pieces}
    dropped = {op.name for each in pieces for op in each.whole}
    made = {name for each in pieces for name in each.made}
    groups = {each.param: each.group for each in pieces}
    ops: list[Op] = []
    for op in dataflow.ops:
        if op.name not in dropped:
            ops.append(op)
        elif op.name in instead:
            ops += instead[op.name]
    return replace(
        dataflow,
        ops=tuple(ops),
        buffers=(
            *(buffer for buffer in dataflow.buffers if buffer.name not in made),
            *(buffer for each in pieces for buffer in each.buffers),
        ),
        updates=tuple(groups.get(group.param, group) for group in dataflow.updates),
        pieces=Pieces(
            {part: whole for each in pieces for part, whole in each.wholes.items()},
            {each.param: tuple(piece.ops for piece in each.pieces) for each in pieces},
        ),
    )


@remembered
def _pieced(dataflow: Dataflow, cut: tuple[str, tuple[int, ...], frozenset[str]]) -> Pieced:
    """The update of a parameter of `dataflow` with these bounds, and these buffers fetched."""
    return _Rewriting(dataflow, *cut).run()


class _Rewriting:
    """One update in pieces: its `ops` and `buffers`, in place of the ops `by_element`.

    They come where the last of these was; `made` are the buffers that these have made.
    """

    def __init__(
        self, dataflow: Dataflow, param: str, bounds: tuple[int, ...], fetched: frozenset[str]
    ) -> None:
        self.dataflow, self.bounds, self.fetched = dataflow, bounds, fetched
        self.group = dataflow.update[param]
        self.by_element = by_element(dataflow, self.group)
        own = {self.group.param, self.group.gradient, *self.group.states}
        self.maker = {
            name: op
            for op in reversed(self.by_element)
            for name in op.writes
            if name not in own and not dataflow.buffer[name].is_input
        }
        self.ops: list[Op] = []
        self.buffers: dict[str, Buffer] = {}
        self.wholes: dict[str, str] = {}

    def run(self) -> Pieced:
        cut = [self._cut(number, *span) for number, span in enumerate(pairwise(self.bounds))]
        parts = [self._with_numbers(cut[0]), *cut[1:]]
        return Pieced(
            self.group.param,
            self.bounds,
            self.fetched,
            tuple(self.by_element),
            frozenset(self.maker),
            tuple(op for part in cut for op in part),
            tuple(self.buffers.values()),
            self.wholes,
            tuple(map(self._piece, parts)),
            self._common_bytes(parts),
            replace(self.group, ops=tuple(op.name for part in parts for op in part)),
        )

    def _cut(self, number: int, begin: int, end: int) -> list[Op]:
        share = (end - begin) / self.group.elements
        return [
            replace(
                op,
                name=piece_name(op.name, number),
                reads=tuple(self._renamed(each, number, begin, end) for each in op.reads),
                writes=tuple(self._renamed(each, number, begin, end) for each in op.writes),
                flops=int(op.flops * share),
                bytes_moved=int(op.bytes_moved * share),
            )
            for op in self.by_element
        ]

    def _renamed(self, name: str, number: int, begin: int, end: int) -> str:
        if name in self.fetched:
            new = part_name(name, begin, end)
            self.wholes[new] = name
        elif name in self.maker:
            maker = self.maker[name].name
            new = piece_name(maker, number) + name.removeprefix(maker).rstrip("~")
        else:
            return name
        if new not in self.buffers:
            itemsize = self.dataflow.buffer[name].nbytes // self.group.elements
            self.buffers[new] = Buffer(new, itemsize * (end - begin), Role.TEMPORARY)
        return new

    def _with_numbers(self, first: Sequence[Op]) -> list[Op]:
        """What works on single numbers goes with the first piece, in the order of the step."""
        dropped, found = {op.name for op in self.by_element}, list[Op]()
        for name in self.group.ops:
            if name == self.by_element[-1].name:
                found += first
            elif name not in dropped:
                found.append(self.dataflow.ops[self.dataflow.position[name]])
        return found

    def _piece(self, ops: Sequence[Op]) -> Piece:
        touched = dict.fromkeys(name for op in ops for name in (*op.reads, *op.writes))
        return Piece(
            tuple(op.name for op in ops),
            tuple(name for name in touched if name in self.wholes),
            frozenset(name for op in ops for name in op.writes),
            self._workspace_bytes(ops),
        )

    def _workspace_bytes(self, ops: Sequence[Op]) -> int:
        spans: dict[str, tuple[int, int]] = {}
        for index, op in enumerate(ops):
            for name in (*op.reads, *op.writes):
                spans[name] = (spans.get(name, (index, index))[0], index + 1)
        alive = [0] * len(ops)
        for name in {name for op in ops for name in self._made(op)}:
            for index in range(*spans[name]):
                alive[index] += self._buffer(name).nbytes
        return max(alive, default=0)

    def _common_bytes(self, parts: Sequence[Sequence[Op]]) -> int:
        made = {name for op in parts[0] for name in self._made(op)}
        read = {name for part in parts[1:] for op in part for name in op.reads}
        return sum(self._buffer(name).nbytes for name in made & read)

    def _made(self, op: Op) -> list[str]:
        return [n for n in op.writes if not (self._buffer(n).is_input or n in self.wholes)]

    def _buffer(self, name: str) -> Buffer:
        return self.buffers.get(name) or self.dataflow.buffer[name]


def piece_seconds(
    pieces: Sequence[Pieced], device_s: Mapping[str, float], machine: Machine
) -> dict[str, float]:
    """What the ops of pieces take: their share of the whole, and no less than a launch.

    An update is one loop on a device that `fuses_updates`, and so is each of its pieces.
    """
    found: dict[str, float] = {}
    launch_s = machine.device.launch_s
    for pieced in pieces:
        whole_s = [device_s[op.name] for op in pieced.whole]
        loop_s = sum(whole_s)
        together_s = [loop_s if machine.fuses_updates else seconds for seconds in whole_s]
        least = [min(1.0, launch_s / each) if each else 0.0 for each in together_s]
        elements, own_s, ops = pieced.group.elements, dict[float, list[float]](), iter(pieced.ops)
        for begin, end in pairwise(pieced.bounds):
            share = (end - begin) / elements
            if share not in own_s:  # all but the last are alike
                own_s[share] = [
                    seconds * max(share, low) for seconds, low in zip(whole_s, least, strict=True)
                ]
            for seconds in own_s[share]:
                found[next(ops).name] = seconds
    return found
