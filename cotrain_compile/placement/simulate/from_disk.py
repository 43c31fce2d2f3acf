"""From disk: what reads from a drive, or writes there, as works on it and on the host.

An update of what rests on disk reads pieces ahead of its turn, as far as there are rooms, updates
each when it has come, and writes it back beside the next. Casts and fetches read so, too, and
offloads write. Here each goes in a few parts of several pieces: that is enough for them to overlap
as they do when all pieces are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.simulate.engine import Work
from cotrain_compile.plan import HostRegion, Lane, Task, Transfer
from cotrain_compile.plan.on_disk import PIECE_BYTES, THREADS, read_for_update, resting

# In how many parts an update goes at most.
PARTS = 4
# A part is read when this many before it have been written: the others fill the rooms.
AHEAD = 3


class FromDisk:
    """The works of what reads from disk, in their order of issue, which is that of the drive's."""

    def __init__(self, placed: PlacedStep) -> None:
        self._placed, self._machine = placed, placed.problem.machine
        homes = placed.placement.homes.items()
        self._on_disk = {name for name, tier in homes if tier is Tier.DISK}
        self._on_disk |= set(placed.placement.offloaded_to_disk)
        self._written: list[str] = []  # of all parts of updates so far
        self._used: list[str] = []  # of all parts of casts and fetches
        self._stored: list[str] = []  # of all parts of offloads

    def works_of(self, task: Task, work: Work, begins: tuple[str, ...]) -> Iterator[Work]:
        """`work`, which is all of `task`, with its reads and writes where it has any.

        An update `begins` to read where it is issued, and holds the host until its last write. What
        a cast or a fetch reads may be what a task has written that it comes after.
        """
        if task.is_offload:
            yield from self._stores(task, work)
            return
        names, written = self._read_by(task)
        if not names:
            yield work
            return
        is_update, name = isinstance(task, HostRegion) and not task.makes, work.name
        parts = self._parts(names)
        read_s, write_s = self._read_s(names) / parts, self._write_s(written) / parts
        passed = self._written if is_update else self._used
        for part in range(parts):
            is_last = part == parts - 1
            read, write = f"read.{part}.{name}", f"write.{part}.{name}"
            use = name if is_last else f"{part}.{name}"
            room = passed[-AHEAD : len(passed) - AHEAD + 1]
            first = begins if is_update else work.after
            yield Work(read, Lane.DISK_READ, read_s, (*first, *room), work.after_previous)
            before = work.after if part == 0 else (f"{part - 1}.{name}",)
            seconds = work.seconds / parts
            yield Work(use, work.lane, seconds, (*before, read), work.after_previous)
            if is_update:
                yield Work(write, Lane.DISK_WRITE, write_s, (use,))
            passed.append(write if is_update else use)

    def _stores(self, task: Task, work: Work) -> Iterator[Work]:
        """An offload to disk: each part is written when it has crossed the link to a room."""
        names = [task.buffer] if isinstance(task, Transfer) and task.buffer in self._on_disk else []
        if not names:
            yield work
            return
        parts, name = self._parts(names), work.name
        for part in range(parts):
            down = f"down.{part}.{name}"
            room = self._stored[-AHEAD : len(self._stored) - AHEAD + 1]
            before = work.after if part == 0 else (f"down.{part - 1}.{name}",)
            yield Work(down, work.lane, work.seconds / parts, (*before, *room), work.after_previous)
            write = name if part == parts - 1 else f"{part}.{name}"
            yield Work(write, Lane.DISK_WRITE, self._write_s(names) / parts, (down,))
            self._stored.append(write)

    def _parts(self, names: Sequence[str]) -> int:
        return min(PARTS, -(-max(self._sizes(names)) // PIECE_BYTES))

    def _sizes(self, names: Sequence[str]) -> list[int]:
        return [self._placed.dataflow.buffer[name].nbytes for name in names]

    def _read_s(self, names: Sequence[str]) -> float:
        """Seconds to read all of what is called so, piece by piece."""
        moved = self._machine.copy_s(sum(self._sizes(names)), Tier.DISK, Tier.HOST, copies=0)
        return moved + self._latency_s(names)

    def _write_s(self, names: Sequence[str]) -> float:
        """The same to write it."""
        moved = self._machine.copy_s(sum(self._sizes(names)), Tier.HOST, Tier.DISK, copies=0)
        return moved + self._latency_s(names)

    def _latency_s(self, names: Sequence[str]) -> float:
        """Once, and for what is missing of whole pieces.

        A rate is of whole ones, `THREADS` at a time, which hide what it takes to begin one.
        """
        missing = sum(-nbytes % PIECE_BYTES for nbytes in self._sizes(names)) / PIECE_BYTES
        return self._machine.links[Lane.DISK_READ].latency_s * (1 + missing / THREADS)

    def _read_by(self, task: Task) -> tuple[Sequence[str], Sequence[str]]:
        """What `task`, which is no offload, reads from disk, and what of it is written there."""
        placement = self._placed.placement
        match task:
            case Transfer():
                read = (task.buffer,) if task.is_fetch else ()
            case HostRegion() if task.makes:
                read = (task.param,)
            case HostRegion():
                group = self._placed.dataflow.update[task.param]
                if task.guesses:
                    return (), ()
                return read_for_update(placement, group), resting(placement, group)
            case _:
                assert_never(task)
        return tuple(name for name in read if name in self._on_disk), ()
