"""State files: tensors that rest in files, whatever a file system does and does not."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_compile.errors import DiskError
from cotrain_compile.plan.on_disk import PIECE_BYTES, ROOMS
from cotrain_compile.runtime.disk.rooms import Rooms
from cotrain_compile.runtime.disk.state_files import file_of, leave_disk, rest_on_disk

# Three pieces, the last of which ends inside of a block.
ELEMENTS = 2 * PIECE_BYTES // 4 + 1001


def resting(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in a file, and what it was before."""
    tensor = torch.arange(ELEMENTS, dtype=torch.float32)
    before = tensor.clone()
    rest_on_disk([tensor], folder)
    return tensor, before


def doubled(tensor: torch.Tensor) -> None:
    """Pass it through rooms, and double what is in each."""
    file = file_of(tensor)
    assert file is not None
    passing = Rooms(ROOMS * PIECE_BYTES).ask([file], tensor.nbytes)
    for number in range(passing.count):
        room = passing.take(number)
        room.elements(0, passing.size(number), tensor.dtype).mul_(2)
        passing.give_back(number)
    passing.finish()


def test_a_tensor_shows_what_has_passed_through_rooms(tmp_path: Path) -> None:
    tensor, before = resting(tmp_path)
    torch.testing.assert_close(tensor, before, rtol=0, atol=0)
    doubled(tensor)
    torch.testing.assert_close(tensor, 2 * before, rtol=0, atol=0)
    tensor.add_(1)  # by way of the mapping
    doubled(tensor)
    torch.testing.assert_close(tensor, 2 * (2 * before + 1), rtol=0, atol=0)
    leave_disk([tensor])
    assert file_of(tensor) is None
    torch.testing.assert_close(tensor, 2 * (2 * before + 1), rtol=0, atol=0)


def test_tensors_that_share_memory_share_a_file(tmp_path: Path) -> None:
    whole = torch.arange(2000.0)
    part = whole.view(2, 1000)[1]
    rest_on_disk([whole, part], tmp_path)
    part.zero_()
    assert whole[1000:].count_nonzero() == 0
    assert file_of(whole) is not None


def test_a_read_or_write_may_do_less_than_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, _half(getattr(os, name)))
    tensor, before = resting(tmp_path)
    doubled(tensor)
    torch.testing.assert_close(tensor, 2 * before, rtol=0, atol=0)


def test_without_direct_reads_it_says_so_and_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refusing(fd: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    tensor = torch.arange(5000.0)
    assert not rest_on_disk([tensor], tmp_path)
    doubled(tensor)
    torch.testing.assert_close(tensor, 2 * torch.arange(5000.0), rtol=0, atol=0)


def test_files_keep_no_name_where_the_file_system_has_none_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def named(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", named)
    tensor, before = resting(tmp_path)
    assert not list(tmp_path.iterdir())
    torch.testing.assert_close(tensor, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "number", "told"),
    [
        ("open", errno.EROFS, r"no file can be made .*Read-only.*Nothing was updated"),
        ("posix_fallocate", errno.ENOSPC, r"no room for a tensor .*No space left.*free some, or"),
        ("pwritev", errno.EIO, r"could not be written: Input/output error"),
    ],
)
def test_what_cannot_rest_there_stays_as_it_is(
    call: str, number: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    tensor = torch.ones(5000)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DiskError, match=told):
        rest_on_disk([tensor], tmp_path)
    assert file_of(tensor) is None
    assert bool(tensor.eq(1).all())


def _half(call: Callable[[int, list[memoryview], int], int]) -> Callable[..., int]:
    """`call` for the first of several blocks alone."""

    def some(fd: int, rooms: list[memoryview], offset: int) -> int:
        room = memoryview(rooms[0])
        return call(fd, [room[: max(4096, len(room) // 2 // 4096 * 4096)]], offset)

    return some
