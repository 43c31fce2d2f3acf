"""Moves of pieces: an update on the device as one for each of its pieces.

In: the update as a whole and the ops of each piece, in a Dataflow that has them. Out: a
`DeviceUpdate` for each. What a piece has of its own is fetched for it and sent home after it; what
all of them read, and what only goes as a whole, is held until the last has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.placement.residency import IntervalSum
from cotrain_compile.placement.schedule import books
from cotrain_compile.placement.schedule.moves import DeviceUpdate, Fetch


def in_pieces(
    dataflow: Dataflow,
    whole: DeviceUpdate,
    parts: Sequence[Sequence[str]],
    device_s: Mapping[str, float],
) -> list[DeviceUpdate]:
    """`whole` as an update for each of the `parts`, which are names of its ops."""
    wholes, last = dataflow.pieces.wholes, len(parts) - 1
    after = {fetch.buffer: fetch.after for fetch in whole.fetches}
    ops = [[dataflow.ops[dataflow.position[name]] for name in part] for part in parts]
    in_parts = {name for part in parts for name in part}
    own = {wholes[name] for part in ops for op in part for name in op.reads if name in wholes}
    common_bytes = _read_by_later(dataflow, ops)
    found = []
    for number, part in enumerate(ops):
        touched = dict.fromkeys(name for op in part for name in (*op.reads, *op.writes))
        written = {name for op in part for name in op.writes}
        pieces = [name for name in touched if name in wholes]
        fetches = [_fetch(dataflow, n, whole.earliest, after[wholes[n]]) for n in pieces]
        stores = [name for name in pieces if name in written]
        names = tuple(parts[number])
        if not number:  # what is no piece of anything goes with the first, which needs it
            fetches += [fetch for fetch in whole.fetches if fetch.buffer not in own]
            names = (*(name for name in whole.ops if name not in in_parts), *names)
            stores += [n for n in whole.stores if n in after and n not in own]
        if number == last:  # a weight that was fetched as a whole goes home as one
            stores += [n for n in whole.stores if n not in after and n not in own]
        found.append(
            replace(
                whole,
                ops=names,
                fetches=tuple(sorted(fetches, key=lambda fetch: bool(fetch.after))),
                stores=tuple(stores),
                gradient_bytes=(whole.gradient_bytes + common_bytes) * (number == last),
                weight_bytes=whole.weight_bytes * (number == last),
                workspace_bytes=_workspace_bytes(dataflow, part) + common_bytes,
                seconds=sum(device_s[name] for name in names),
                number=number,
            )
        )
    return found


def _fetch(dataflow: Dataflow, piece: str, need: int, after: tuple[str, ...]) -> Fetch:
    name = books.task_name("fetch", piece)
    return Fetch(name, piece, dataflow.buffer[piece].nbytes, need, after)


def _read_by_later(dataflow: Dataflow, parts: Sequence[Sequence[Op]]) -> int:
    """Bytes of the numbers that the first part makes and others read."""
    made = {name for op in parts[0] for name in _made(dataflow, op)}
    read = {name for part in parts[1:] for op in part for name in op.reads}
    return sum(dataflow.buffer[name].nbytes for name in made & read)


def _made(dataflow: Dataflow, op: Op) -> list[str]:
    wholes, buffer = dataflow.pieces.wholes, dataflow.buffer
    return [name for name in op.writes if not (buffer[name].is_input or name in wholes)]


def _workspace_bytes(dataflow: Dataflow, part: Sequence[Op]) -> int:
    """The most bytes that the values made inside a piece take at once."""
    spans: dict[str, tuple[int, int]] = {}
    for index, op in enumerate(part):
        for name in (*op.reads, *op.writes):
            spans[name] = (spans.get(name, (index, index))[0], index + 1)
    curve = IntervalSum(len(part))
    for name in {name for op in part for name in _made(dataflow, op)}:
        curve.add(dataflow.buffer[name].nbytes, *spans[name])
    return max(curve.values(), default=0)
