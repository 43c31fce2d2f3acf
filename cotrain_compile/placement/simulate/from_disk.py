"""From disk: what an update whose states rest on disk does, as works on the host and the drive.

It reads pieces ahead of its turn, as far as there are rooms, updates each when it has come, and
writes it back beside the next. Here an update goes in a few parts, each of several pieces: that is
enough for updates to overlap as they do when all pieces are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from cotrain_compile.machine import Tier
from cotrain_compile.on_disk import PIECE_BYTES, resting
from cotrain_compile.placement.placed import PlacedStep
from cotrain_compile.placement.simulate.engine import Work
from cotrain_compile.plan import HostRegion, Lane, Task

# In how many parts an update goes at most.
PARTS = 4
# A part is read when this many before it have been written: the others fill the rooms.
AHEAD = 3


class FromDisk:
    """The works of updates, in their order of issue, which is that of the drive's."""

    def __init__(self, placed: PlacedStep) -> None:
        self._placed = placed
        self._written: list[str] = []  # of all parts so far

    def works_of(self, task: Task, work: Work, begins: tuple[str, ...]) -> Iterator[Work]:
        """`work`, which is all of `task`, with its reads and writes where it has any.

        The task `begins` to read where it is issued; the host is held until its last write.
        """
        states = self._states(task)
        if not states:
            yield work
            return
        sizes = [self._placed.dataflow.buffer[name].nbytes for name in states]
        parts = min(PARTS, -(-max(sizes) // PIECE_BYTES))
        machine, nbytes, name = self._placed.problem.machine, sum(sizes) / parts, work.name
        copies = -(-max(sizes) // PIECE_BYTES) / parts * len(sizes)
        latency_s = machine.links[Lane.DISK_READ].latency_s * copies
        read_s = machine.copy_s(nbytes, Tier.DISK, Tier.HOST, copies=0) + latency_s
        write_s = machine.copy_s(nbytes, Tier.HOST, Tier.DISK, copies=0) + latency_s
        for part in range(parts):
            is_last = part == parts - 1
            read, write = f"read.{part}.{name}", f"write.{part}.{name}"
            update = name if is_last else f"{part}.{name}"
            room = self._written[-AHEAD : len(self._written) - AHEAD + 1]
            yield Work(read, Lane.DISK_READ, read_s, (*begins, *room), work.after_previous)
            before = work.after if part == 0 else (f"{part - 1}.{name}",)
            seconds = work.seconds / parts
            yield Work(update, Lane.HOST, seconds, (*before, read), work.after_previous)
            yield Work(write, Lane.DISK_WRITE, write_s, (update,))
            self._written.append(write)

    def _states(self, task: Task) -> tuple[str, ...]:
        """The states that `task` reads from disk and writes there."""
        if not isinstance(task, HostRegion) or task.makes or task.guesses:
            return ()
        return resting(self._placed.placement, self._placed.dataflow.update[task.param])
