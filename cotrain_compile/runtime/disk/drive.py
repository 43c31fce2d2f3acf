"""Drive: what a device has of a drive: a folder, the rooms, and the updates that use them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cotrain_compile.runtime.disk.resting_kernel import RestingKernel
from cotrain_compile.runtime.disk.rooms import Rooms
from cotrain_compile.runtime.disk.state_files import rest_on_disk

LOG = logging.getLogger("cotrain_compile")


class Drive:
    """Rooms of `room_bytes` together; states rest in `folder`; `kernels` by task."""

    def __init__(self, folder: str, room_bytes: int, kernels: Mapping[str, RestingKernel]) -> None:
        self.folder, self.kernels = Path(folder), kernels
        self.rooms = Rooms(room_bytes)
        self._has_told = False

    def bring_home(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let `tensors` rest in files; raises `DiskError`."""
        if rest_on_disk(tensors, self.folder) or self._has_told:
            return
        self._has_told = True
        LOG.warning(
            "cotrain: the file system of %s has no direct reads and writes, so states pass through "
            "the page cache, which is slower; give the option disk a folder on a local drive",
            self.folder,
        )
