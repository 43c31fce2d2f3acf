"""State files: tensors of the user's whose memory is a file, with the way to its bytes beside it.

A tensor comes to rest on disk by its `.data`, as other tensors come to their homes: the object that
the optimizer holds stays the same, and shows a mapping of the file. So `state_dict`, `torch.save`,
`load_state_dict` and eager code read and write it as ever. A step reads and writes the file itself,
past the page cache; Linux keeps both views of a file alike. A file has no name: nothing is left of
it when the process ends, in whatever way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cotrain_compile.capture.state.untouched import is_untouched_zero
from cotrain_compile.errors import DiskError
from cotrain_compile.plan.on_disk import BLOCK_BYTES, whole_blocks
from cotrain_compile.support.units import format_bytes

# Where a file system has no files without a name.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
# What is written at a time when a tensor comes to rest on disk.
_MOVED_BYTES = 1 << 24


class StateFile:
    """A file of whole blocks for `nbytes` in `folder`; `is_direct`: past the page cache.

    Raises `DiskError` where there is no room for all of it, or no file can be made.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.fd = _unnamed_file(folder, nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.is_direct = _is_direct(self.fd)

    def read(self, room: memoryview, offset: int) -> None:
        """Fill `room` from `offset` on; both are whole blocks. Raises `DiskError`."""
        self._pass(os.preadv, "read", room, offset)

    def write(self, room: memoryview, offset: int) -> None:
        """Write `room` from `offset` on; as `read`."""
        self._pass(os.pwritev, "written", room, offset)

    def _pass(
        self,
        call: Callable[[int, list[memoryview], int], int],
        what: str,
        room: memoryview,
        offset: int,
    ) -> None:
        done = 0
        while done < len(room):
            try:
                count = call(self.fd, [room[done:]], offset + done)
            except OSError as error:
                raise self._failed(what, error.strerror or str(error)) from error
            if not count:
                raise self._failed(what, f"the file ends after {offset + done} bytes")
            done += count
        if not self.is_direct:
            self.leave_no_pages(offset, len(room), written=call is os.pwritev)

    def leave_no_pages(self, offset: int, nbytes: int, *, written: bool) -> None:
        """Let the page cache have nothing of these bytes."""
        if written:
            os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, what: str, why: str) -> DiskError:
        return DiskError(
            f"a tensor of {format_bytes(self.nbytes)} that rests on disk in {self.folder} could "
            f"not be {what}: {why}"
        )


class _Mapping(mmap.mmap):
    """The memory of a tensor that rests in `file`."""

    file: StateFile


# By the address of the mapping, which is its own as long as it is there.
_mappings: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()


def file_of(tensor: torch.Tensor) -> StateFile | None:
    """The file in which a tensor rests, all of which it shows; None where it is in memory."""
    if tensor.device.type != "cpu" or tensor.storage_offset():
        return None
    mapping = _mappings.get(tensor.untyped_storage().data_ptr())
    return None if mapping is None else mapping.file


def rest_on_disk(tensors: Sequence[torch.Tensor], folder: Path) -> bool:
    """Let each of `tensors` rest in a file in `folder`, if it rests in none.

    Returns whether all are read and written past the page cache, with all bytes there. Tensors that
    share a storage move together. Raises `DiskError`; what has moved by then stays where it is.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    found = [file_of(members[0]) or _moved(members, folder) for members in groups.values()]
    return all(file.is_direct for file in found)


def new_on_disk(like: torch.Tensor, folder: Path) -> torch.Tensor:
    """A row like `like`, of zeros, that rests in a file in `folder`. Raises `DiskError`."""
    file = StateFile(folder, like.nbytes)
    return _shown(file).view(like.dtype)


def leave_disk(tensors: Sequence[torch.Tensor]) -> None:
    """Let those of `tensors` that rest on disk have memory of their own again."""
    for tensor in tensors:
        if file_of(tensor) is not None:
            tensor.data = tensor.detach().clone()


def _moved(members: Sequence[torch.Tensor], folder: Path) -> StateFile:
    row = torch.empty(0, dtype=torch.uint8).set_(members[0].detach().untyped_storage())
    file = StateFile(folder, row.nbytes)
    if not is_untouched_zero(members[0]):  # a new file is all zeros
        _write(file, row)
    shown = _shown(file)
    for tensor in members:
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            shown.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return file


def _shown(file: StateFile) -> torch.Tensor:
    """The bytes of `file` as the memory of a tensor."""
    mapping = _Mapping(file.fd, whole_blocks(file.nbytes))
    mapping.file = file
    shown = torch.frombuffer(mapping, dtype=torch.uint8, count=file.nbytes)
    _mappings[shown.data_ptr()] = mapping
    return shown


def _write(file: StateFile, row: torch.Tensor) -> None:
    """Write `row`, which lies anywhere, past the page cache."""
    room = memoryview(mmap.mmap(-1, _MOVED_BYTES))
    for start in range(0, row.nbytes, _MOVED_BYTES):
        part = row[start : start + _MOVED_BYTES]
        room[: part.nbytes] = part.cpu().numpy().data
        file.write(room[: whole_blocks(part.nbytes)], start)


def _unnamed_file(folder: Path, nbytes: int) -> int:
    """A new file that has no name, with room on the drive for all of it. Raises `DiskError`."""
    try:
        fd = _opened(folder)
    except OSError as error:
        raise DiskError(
            f"no file can be made in {folder}, which the option disk names: {error.strerror}; give "
            "a folder on a drive that this process may write to. Nothing was updated"
        ) from error
    try:
        os.posix_fallocate(fd, 0, whole_blocks(nbytes))
    except OSError as error:
        os.close(fd)
        raise DiskError(
            f"{folder} has no room for a tensor of {format_bytes(nbytes)}: {error.strerror}; free "
            "some, or set disk_budget lower. Nothing was updated"
        ) from error
    return fd


def _opened(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE or not folder.is_dir():
            raise
    fd, name = tempfile.mkstemp(prefix=".cotrain-", dir=folder)
    os.unlink(name)
    return fd


def _is_direct(fd: int) -> bool:
    """Whether reads and writes go past the page cache: not on every file system."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as room:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(fd, [room], 0)
        except OSError:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            return False
    return True
