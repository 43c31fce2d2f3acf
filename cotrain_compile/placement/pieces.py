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

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Pieces, Role, UpdateGroup
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.remembered import remembered
from cotrain_compile.plan import Placement, UpdateMode

# Of the parameter. A link takes about a millisecond for it, so that what it takes to start a copy
# and the ops of a piece is a small part.
PIECE_BYTES = 32 << 20
# Pieces begin at multiples of so many elements, as vector units and lines of caches like it.
ALIGNED = 1024


@dataclass(frozen=True)
class Pieced:
    """The update of `param` in pieces, each from one of the `bounds` to the next, in elements.

    Of the buffers `fetched` each piece has a piece of its own; what else it touches lies on the
    device as a whole.
    """

    param: str
    bounds: tuple[int, ...]
    fetched: frozenset[str]


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
            yield Pieced(group.param, bounds, frozenset(fetched))


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
    rewritten = [_Rewriting(dataflow, pieced) for pieced in pieces]
    instead = {each.place: each.ops for each in rewritten}
    dropped = {op.name for each in rewritten for op in each.by_element}
    made = {name for each in rewritten for name in each.made}
    groups = {each.group.param: each.new_group() for each in rewritten}
    return replace(
        dataflow,
        ops=tuple(
            new
            for op in dataflow.ops
            for new in (*instead.get(op.name, ()), *(() if op.name in dropped else (op,)))
        ),
        buffers=(
            *(buffer for buffer in dataflow.buffers if buffer.name not in made),
            *(buffer for each in rewritten for buffer in each.buffers.values()),
        ),
        updates=tuple(groups.get(group.param, group) for group in dataflow.updates),
        pieces=Pieces(
            {part: whole for each in rewritten for part, whole in each.wholes.items()},
            {each.group.param: each.parts for each in rewritten},
        ),
    )


class _Rewriting:
    """One update in pieces: its `ops` and `buffers`, in place of the ops `by_element`.

    They come where the last of these was, the `place`; `made` are the buffers that these have made.
    """

    def __init__(self, dataflow: Dataflow, pieced: Pieced) -> None:
        self.dataflow, self.pieced = dataflow, pieced
        self.group = dataflow.update[pieced.param]
        self.by_element = by_element(dataflow, self.group)
        self.place = self.by_element[-1].name
        own = {self.group.param, self.group.gradient, *self.group.states}
        self.made = {
            name
            for op in self.by_element
            for name in op.writes
            if name not in own and not dataflow.buffer[name].is_input
        }
        self.ops: list[Op] = []
        self.buffers: dict[str, Buffer] = {}
        self.wholes: dict[str, str] = {}
        of_pieces = [
            self._piece(number, *span) for number, span in enumerate(pairwise(pieced.bounds))
        ]
        self.parts = (self._first(of_pieces[0]), *of_pieces[1:])

    def _piece(self, number: int, begin: int, end: int) -> tuple[str, ...]:
        names = []
        for op in self.by_element:
            name = piece_name(op.name, number)
            reads, writes = (
                tuple(self._renamed(each, number, begin, end) for each in touched)
                for touched in (op.reads, op.writes)
            )
            share = (end - begin) / self.group.elements
            self.ops.append(
                replace(
                    op,
                    name=name,
                    reads=reads,
                    writes=writes,
                    flops=int(op.flops * share),
                    bytes_moved=int(op.bytes_moved * share),
                )
            )
            names.append(name)
        return tuple(names)

    def _renamed(self, name: str, number: int, begin: int, end: int) -> str:
        buffer = self.dataflow.buffer[name]
        if name in self.pieced.fetched:
            new = part_name(name, begin, end)
            self.wholes[new] = name
        elif name in self.made:
            maker = next(each for each in self.by_element if name in each.writes)
            new = piece_name(maker.name, number) + name.removeprefix(maker.name).rstrip("~")
        else:
            return name
        itemsize = buffer.nbytes // self.group.elements
        self.buffers[new] = Buffer(new, itemsize * (end - begin), Role.TEMPORARY)
        return new

    def _first(self, of_piece: Sequence[str]) -> tuple[str, ...]:
        """What works on single numbers goes with the first piece, in the order of the step."""
        dropped, found = {op.name for op in self.by_element}, list[str]()
        for name in self.group.ops:
            found += of_piece if name == self.place else ()
            found += [name] if name not in dropped else []
        return tuple(found)

    def new_group(self) -> UpdateGroup:
        return replace(self.group, ops=tuple(name for part in self.parts for name in part))


def piece_seconds(
    dataflow: Dataflow,
    pieces: Sequence[Pieced],
    device_s: Mapping[str, float],
    machine: Machine,
) -> dict[str, float]:
    """What the ops of pieces take: their share of the whole, and no less than a launch.

    An update is one loop on a device that `fuses_updates`, and so is each of its pieces.
    """
    found: dict[str, float] = {}
    launch_s = machine.device.launch_s
    for pieced in pieces:
        group = dataflow.update[pieced.param]
        whole = {op.name: device_s[op.name] for op in by_element(dataflow, group)}
        loop_s = sum(whole.values())
        for number, (begin, end) in enumerate(pairwise(pieced.bounds)):
            share = (end - begin) / group.elements
            for op, seconds in whole.items():
                together_s = loop_s if machine.fuses_updates else seconds
                least = min(1.0, launch_s / together_s) if together_s else 0.0
                found[piece_name(op, number)] = seconds * max(share, least)
    return found
