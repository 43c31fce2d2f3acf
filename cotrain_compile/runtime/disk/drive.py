"""Drive: what a device has of a drive: a folder, the rooms, and the updates that use them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.on_disk import read_room_bytes, update_room_bytes
from cotrain_compile.plan import Placement
from cotrain_compile.runtime.disk.resting_kernel import RestingKernel
from cotrain_compile.runtime.disk.rooms import Rooms
from cotrain_compile.runtime.disk.state_files import StateFile, file_of, rest_on_disk

LOG = logging.getLogger("cotrain_compile")


class Drive:
    """What `placement` has on disk rests in `folder`; `kernels` by task.

    `rooms` are those of updates, `reading` those of casts and fetches.
    """

    def __init__(
        self,
        folder: str,
        dataflow: Dataflow,
        placement: Placement,
        kernels: Mapping[str, RestingKernel],
    ) -> None:
        self.folder, self.kernels = Path(folder), kernels
        self.rooms = Rooms(update_room_bytes(dataflow, placement))
        self.reading = Rooms(read_room_bytes(dataflow, placement))
        self._has_told = False

    @property
    def room_bytes(self) -> int:
        """Bytes of all rooms."""
        return self.rooms.nbytes + self.reading.nbytes

    def pieces(self, file: StateFile, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """All of `file` as elements, piece by piece, each with where it belongs, in turn.

        A piece is there until the next one is asked for. Raises `DiskError`.
        """
        passing = self.reading.ask([file], file.nbytes)
        try:
            yield from passing.pieces(dtype)
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
        """Let `tensors` rest in files; raises `DiskError`."""
        if rest_on_disk(tensors, self.folder) or self._has_told:
            return
        self._has_told = True
        LOG.warning(
            "cotrain: the file system of %s has no direct reads and writes, so what rests there "
            "passes through the page cache, which is slower; give the option disk a folder on a "
            "local drive",
            self.folder,
        )
