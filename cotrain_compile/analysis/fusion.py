"""Fusion: which ops a compiled step runs as one kernel, and the bytes that each then moves.

In: a `Dataflow`. Out: for each op that is limited by memory, its share of what its kernel reads and
writes. A rule close to that of torch's Inductor: element by element, and norms, sums and what is
made of them, where no other kernel runs between two of them.

The level of an op is the most other kernels on a path to it. A kernel is what is connected, maker
to reader, on one level: so no path from one of its ops to another leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cotrain_compile.dataflow import Buffer, Dataflow, Op
from cotrain_compile.machine.op_classes import FUSIBLE, OpKind


@dataclass(frozen=True)
class Part:
    """What an op has of its kernel: `nbytes` of what that moves, and whether it `begins` it."""

    nbytes: float
    begins: bool


def kernels(ops: Iterable[Op]) -> dict[str, str]:
    """The first op of the kernel that each fusible op is in, by name."""
    level: dict[str, int] = {}
    maker: dict[str, str] = {}
    level_of: dict[str, int] = {}
    first: dict[str, str] = {}

    def root(name: str) -> str:
        while first[name] != name:
            first[name] = name = first[first[name]]
        return name

    for op in ops:
        if not op.writes:
            continue
        at = max((level.get(name, 0) for name in op.reads), default=0)
        fuses = op.kind in FUSIBLE
        if fuses:
            first[op.name], level_of[op.name] = op.name, at
            for name in op.reads:
                made = maker.get(name)
                if made in first and level_of[made] == at:
                    first[root(op.name)] = root(made)
        for name in op.writes:
            level[name] = at if fuses else at + 1
            maker[name] = op.name
    return {name: root(name) for name in first}


def kernel_parts(dataflow: Dataflow) -> dict[str, Part]:
    """What each fusible op moves in its kernel: what comes from elsewhere, and what leaves.

    What several ops of a kernel read is read by the first of them. A sum, whose result is smaller
    than what it reads, goes over that once more.
    """
    kernel = kernels(dataflow.ops)
    inside = _used_inside(dataflow, kernel)
    seen: set[tuple[str, str]] = set()
    made_in: dict[str, str] = {}
    found: dict[str, Part] = {}
    for op in dataflow.ops:
        own = kernel.get(op.name, "")
        if own:
            read = [
                name
                for name in op.reads
                if (op.kind is OpKind.REDUCTION or made_in.get(name) != own)
                and (own, name) not in seen
            ]
            seen.update((own, name) for name in op.reads)
            written = [name for name in op.writes if name not in inside]
            everything = _nbytes(dataflow.buffer, (*op.reads, *op.writes))
            moved = _nbytes(dataflow.buffer, (*read, *written))
            share = moved / everything if everything else 0.0
            found[op.name] = Part(op.bytes_moved * share, begins=own == op.name)
        made_in.update(dict.fromkeys(op.writes, own))
    return found


def _used_inside(dataflow: Dataflow, kernel: Mapping[str, str]) -> set[str]:
    """Buffers that one kernel makes and nothing else reads."""
    makers: dict[str, set[str]] = {}
    for op in dataflow.ops:
        for name in (*op.reads, *op.writes):
            makers.setdefault(name, set()).add(kernel.get(op.name, op.name) if op.writes else "")
    known = {*kernel.values(), ""}
    return {
        name
        for name, users in makers.items()
        if len(users - {""}) == 1
        and users <= known
        and not dataflow.buffer[name].is_input
        and not dataflow.buffer[name].is_output
    }


def _nbytes(buffer: Mapping[str, Buffer], names: Iterable[str]) -> int:
    return sum(buffer[name].nbytes for name in names)
