"""Fusion: which ops a compiled step runs as one kernel, and the bytes that each then moves.

In: a `Dataflow`. Out: for each op that is limited by memory, its share of what its kernel reads and
writes. A rule close to that of torch's Inductor: element by element, and norms, sums and what is
made of them, where no other kernel runs between two of them.

The level of an op is the most other kernels on a path to it, or that of the first of its readers
where all of them are later and of its phase: it is made where it is read. A kernel is what is
connected, maker to reader, on one level: so no path from one of its ops to another leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cotrain_compile.dataflow import Buffer, Dataflow, Op
from cotrain_compile.machine.op_classes import FUSIBLE, OpKind

# A number or two: a loss has its sum and what it divides that by.
_NUMBER_BYTES = 16


@dataclass(frozen=True)
class Part:
    """What an op has of its kernel: `nbytes` of what that moves, and whether it `begins` it."""

    nbytes: float
    begins: bool


def kernels(dataflow: Dataflow) -> dict[str, str]:
    """The first op of the kernel that each fusible op is in, by name."""
    level_of = _levels(dataflow)
    maker: dict[str, str] = {}
    first: dict[str, str] = {}

    def root(name: str) -> str:
        while first[name] != name:
            first[name] = name = first[first[name]]
        return name

    for op in dataflow.ops:
        if op.kind in FUSIBLE and op.writes:
            first[op.name] = op.name
            for name in op.reads:
                made = maker.get(name)
                if made in first and level_of[made] == level_of[op.name]:
                    first[root(op.name)] = root(made)
        maker.update(dict.fromkeys(op.writes, op.name))
    return {name: root(name) for name in first}


def _levels(dataflow: Dataflow) -> dict[str, int]:
    """By op; of what does not fuse that at which it reads. A sum over everything ends a kernel."""
    level: dict[str, int] = {}
    found: dict[str, int] = {}
    for op in dataflow.ops:
        if op.writes:
            at = max((level.get(name, 0) for name in op.reads), default=0)
            found[op.name] = at
            ends = op.kind not in FUSIBLE or _is_number(dataflow.buffer, op)
            level.update(dict.fromkeys(op.writes, at + ends))
    readers: dict[str, list[Op]] = {}
    for op in reversed(dataflow.ops):
        if not op.writes:
            continue
        later = [reader for name in op.writes for reader in readers.get(name, ())]
        if op.kind in FUSIBLE and later and all(r.phase is op.phase for r in later):
            latest = min(found[r.name] for r in later) - _is_number(dataflow.buffer, op)
            found[op.name] = max(found[op.name], latest)
        for name in op.reads:
            readers.setdefault(name, []).append(op)
    return found


def kernel_parts(dataflow: Dataflow) -> dict[str, Part]:
    """What each fusible op moves in its kernel: what comes from elsewhere, and what leaves.

    What several ops of a kernel read is read by the first of them. A sum, whose result is smaller
    than what it reads, goes over that once more.
    """
    kernel = kernels(dataflow)
    inside = used_inside(dataflow, kernel)
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
            moved = _moved(dataflow.buffer, op, read, written)
            found[op.name] = Part(moved, begins=own == op.name)
        made_in.update(dict.fromkeys(op.writes, own))
    return found


def _is_number(buffer: Mapping[str, Buffer], op: Op) -> bool:
    """Whether an op is a sum of all that it reads."""
    return op.kind is OpKind.REDUCTION and _nbytes(buffer, op.writes) <= _NUMBER_BYTES


def _moved(
    buffer: Mapping[str, Buffer], op: Op, read: Iterable[str], written: Iterable[str]
) -> float:
    """Bytes of an op that reads and writes these of its buffers outside.

    It writes its results whole; the rest of what it moves is read.
    """
    of_writes, of_reads = _nbytes(buffer, op.writes), _nbytes(buffer, op.reads)
    writing = min(op.bytes_moved, of_writes)
    found = 0.0
    if of_writes:
        found += writing * _nbytes(buffer, written) / of_writes
    if of_reads:
        found += (op.bytes_moved - writing) * _nbytes(buffer, read) / of_reads
    return found


def used_inside(dataflow: Dataflow, kernel: Mapping[str, str]) -> set[str]:
    """Buffers that one kernel makes and nothing else reads."""
    makers: dict[str, set[str]] = {}
    for op in dataflow.ops:
        # What reads no more than it takes to say which, as a loss, asks others for their shape.
        for name in (*(op.reads if _reads_data(dataflow.buffer, op) else ()), *op.writes):
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


def _reads_data(buffer: Mapping[str, Buffer], op: Op) -> bool:
    """Whether an op reads a hundredth of what it is given."""
    read = op.bytes_moved - min(op.bytes_moved, _nbytes(buffer, op.writes))
    return 100 * read >= _nbytes(buffer, op.reads)


def _nbytes(buffer: Mapping[str, Buffer], names: Iterable[str]) -> int:
    return sum(buffer[name].nbytes for name in names)
