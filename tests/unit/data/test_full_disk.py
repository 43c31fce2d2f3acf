"""A disk that is full: files are the old ones or the new ones, and the error names what it was."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cotrain_compile import files
from cotrain_compile.machine import Machine
from cotrain_compile.presets import find
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.specification import specify


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Within it, a file ends after so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "machine": lambda path: files.save(find("this-machine"), path),
    "text": lambda path: files.write_whole(path, "text " * 100),
    "trace": lambda path: save_trace(specify([]), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("as it was")
    with room_for(10), pytest.raises(OSError, match="File too large"):
        WRITERS[name](path)
    assert path.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["file"]
    WRITERS[name](path)
    assert path.read_text() != "as it was"


def test_a_process_that_dies_while_it_writes_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    files.save(find("this-machine"), path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        files.save(find("h200"), path)
    assert files.load(path, Machine) == find("this-machine")


def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path) -> None:
    path, link = tmp_path / "machine.json", tmp_path / "current.json"
    link.symlink_to(path)
    files.save(find("this-machine"), link)
    assert link.is_symlink()
    assert files.load(path, Machine) == find("this-machine")


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_is_full_stays_a_device() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        files.save(find("this-machine"), "/dev/full")
    assert Path("/dev/full").is_char_device()
