"""Moves of pieces: an update on the device as one for each of its pieces.

In: the update as a whole and what it is in pieces, of a Dataflow that has them. Out: a
`DeviceUpdate` for each. What a piece has of its own is fetched for it and sent home after it; what
all of them read, and what only goes as a whole, is held until the last has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.pieces import Pieced
from cotrain_compile.placement.schedule import books
from cotrain_compile.placement.schedule.moves import DeviceUpdate, Fetch


def in_pieces(
    dataflow: Dataflow, whole: DeviceUpdate, pieced: Pieced, device_s: Mapping[str, float]
) -> list[DeviceUpdate]:
    """`whole` as an update for each of its pieces."""
    wholes, last = pieced.wholes, len(pieced.pieces) - 1
    after = {fetch.buffer: fetch.after for fetch in whole.fetches}
    own = pieced.fetched.intersection(name for op in pieced.whole for name in op.reads)
    found = []
    for number, piece in enumerate(pieced.pieces):
        fetches = [
            _fetch(dataflow, name, whole.earliest, after[wholes[name]]) for name in piece.touched
        ]
        stores = [name for name in piece.touched if name in piece.written]
        names = piece.ops
        if not number:  # what is no piece of anything goes with the first, which needs it
            in_parts = {name for each in pieced.pieces for name in each.ops}
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
                gradient_bytes=(whole.gradient_bytes + pieced.common_bytes) * (number == last),
                weight_bytes=whole.weight_bytes * (number == last),
                workspace_bytes=piece.workspace_bytes + pieced.common_bytes,
                seconds=sum(device_s[name] for name in names),
                number=number,
            )
        )
    return found


def _fetch(dataflow: Dataflow, piece: str, need: int, after: tuple[str, ...]) -> Fetch:
    name = books.task_name("fetch", piece)
    return Fetch(name, piece, dataflow.buffer[piece].nbytes, need, after)
