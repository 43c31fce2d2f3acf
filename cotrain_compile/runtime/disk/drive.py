"""Drive: what a device has of a drive: a folder, the rooms, and the updates that use them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Plan
from cotrain_compile.plan.on_disk import (
    PIECE_BYTES,
    read_room_bytes,
    update_room_bytes,
    write_room_bytes,
)
from cotrain_compile.runtime.disk.resting_kernel import RestingKernel
from cotrain_compile.runtime.disk.rooms import Rooms
from cotrain_compile.runtime.disk.state_files import (
    StateFile,
    file_of,
    new_on_disk,
    rest_on_disk,
)

LOG = logging.getLogger("cotrain_compile")


class Drive:
    """What `plan` has on disk rests in `folder`; `kernels` by task.

    `rooms` are those of updates, `reading` those of casts and fetches, `writing` those of offloads.
    """

    def __init__(
        self,
        folder: str,
        dataflow: Dataflow,
        plan: Plan,
        kernels: Mapping[str, RestingKernel],
    ) -> None:
        self.folder, self.kernels = Path(folder), kernels
        placement = plan.placement
        self.rooms = Rooms(update_room_bytes(dataflow, placement))
        self.reading = Rooms(read_room_bytes(dataflow, placement))
        self.writing = Rooms(write_room_bytes(dataflow, placement))
        sent = {t.buffer: t for t in plan.transfers if t.is_offload and not t.destination}
        # A value that is offloaded has one file for all steps: it is read before it is written
        # anew.
        self._values = {
            sent[name].name: torch.empty(0, dtype=torch.uint8)
            for name in placement.offloaded_to_disk
        }
        self._sizes = {sent[name].name: sent[name].nbytes for name in placement.offloaded_to_disk}
        # What a step leaves in `.grad` is the user's: each has a file of its own.
        self._left = {
            task.name for name, task in sent.items() if placement.homes.get(name) is Tier.DISK
        }
        self._has_told = False

    def stores(self, task: str) -> bool:
        """Whether the offload `task` makes a copy on disk, and not on the host."""
        return task in self._values or task in self._left

    def destination(self, task: str, row: torch.Tensor) -> torch.Tensor:
        """A row on disk for what offload `task` copies of `row`. Raises `DiskError`."""
        known = self._values.get(task)
        if known is not None and known.nbytes == row.nbytes:
            return known.view(row.dtype)
        made = new_on_disk(row, self.folder)
        if known is not None:
            self._values[task] = made.view(torch.uint8)
        return made

    @property
    def room_bytes(self) -> int:
        """Bytes of all rooms."""
        return self.rooms.nbytes + self.reading.nbytes + self.writing.nbytes

    def pieces(self, file: StateFile, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """All of `file` as elements, piece by piece, each with where it belongs, in turn.

        A piece is there until the next one is asked for. Raises `DiskError`.
        """
        passing = self.reading.ask([file], file.nbytes)
        try:
            yield from passing.pieces(dtype)
        finally:
            passing.close()

    def store(
        self, file: StateFile, row: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Write all of `row` to `file`; `copy(room, piece)` brings each piece to a room.

        Returns when all is on disk. Raises `DiskError`.
        """
        passing = self.writing.ask([file], file.nbytes, new=True)
        each = PIECE_BYTES // row.dtype.itemsize
        try:
            for number in range(passing.count):
                room = passing.take(number).elements(0, passing.size(number), row.dtype)
                copy(room, row[number * each : number * each + room.numel()])
                passing.give_back(number)
            passing.finish()
        finally:
            passing.close()

    def cast(self, made: torch.Tensor, source: torch.Tensor) -> None:
        """Let `made`, of the same layout, have the values of `source`, which may rest on disk."""
        file = file_of(source)
        if file is None or not source.is_contiguous():
            made.copy_(source)
            if file is not None:
                file.leave_no_pages(0, file.nbytes, written=False)
            return
        row = made.view(-1)
        for here, piece in self.pieces(file, source.dtype):
            row[here].copy_(piece)

    def bring_home(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let `tensors` rest in files, and make those of values that are offloaded.

        Raises `DiskError`.
        """
        for task, nbytes in self._sizes.items():
            self.destination(task, torch.empty(0, dtype=torch.uint8).new_empty(nbytes))
        if rest_on_disk(tensors, self.folder) or self._has_told:
            return
        self._has_told = True
        LOG.warning(
            "cotrain: the file system of %s has no direct reads and writes, so what rests there "
            "passes through the page cache, which is slower; give the option disk a folder on a "
            "local drive",
            self.folder,
        )
