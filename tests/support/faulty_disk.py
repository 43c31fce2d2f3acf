"""Faulty disk: what Python does to the files below a folder is counted, and made to fail.

`FaultyDisk(root).at(number, fault)` lets one operation fail: making a folder, opening a file to be
written, a write, an fsync, a change of time or a rename. `from_on` lets all fail from one on.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FULL, ILL, SHORT = FAULTS = ("full", "ill", "short")
_ERRORS = {FULL: errno.ENOSPC, ILL: errno.EIO, SHORT: errno.ENOSPC}


class FaultyDisk:
    """What is below `root`; `operations` are what was done there, in order."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.operations: list[str] = []
        self._fails: Callable[[int], bool] = lambda number: False
        self._fault = FULL
        self._descriptors: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within it, operations are counted."""
        with self._failing(lambda number: False, FULL):
            yield

    @contextmanager
    def at(self, number: int, fault: str) -> Iterator[None]:
        """Within it, the operation with that number fails; "short" writes half of the data."""
        with self._failing(lambda each: each == number, fault):
            yield

    @contextmanager
    def from_on(self, number: int) -> Iterator[None]:
        """Within it the disk is full from the operation with that number on."""
        with self._failing(lambda each: each >= number, FULL):
            yield

    @contextmanager
    def _failing(self, fails: Callable[[int], bool], fault: str) -> Iterator[None]:
        self.operations, self._fails, self._fault = [], fails, fault
        with ExitStack() as patches:
            for name in ("replace", "rename", "mkdir", "utime"):
                patched = self._of_path(name, getattr(os, name))
                patches.enter_context(mock.patch.object(os, name, patched))
            patches.enter_context(mock.patch.object(os, "fsync", self._fsync(os.fsync)))
            opening = self._open(open)
            patches.enter_context(mock.patch.object(io, "open", opening))
            patches.enter_context(mock.patch.object(builtins, "open", opening))
            yield

    def begin(self, what: str, path: Any, half: Callable[[], object] | None = None) -> None:
        """Count an operation; raise where it is to fail, after `half` of it was done."""
        number = len(self.operations)
        self.operations.append(what)
        if self._fails(number):
            if half is not None and self._fault == SHORT:
                half()
            code = _ERRORS[self._fault]
            raise OSError(code, os.strerror(code), str(path))

    def has(self, path: Any) -> bool:
        if isinstance(path, int):
            return False
        return bool(os.path.realpath(os.fspath(path)).startswith(self.root))

    def _of_path(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: Any, *arguments: Any, **options: Any) -> Any:
            # To make a folder that is there fails by itself, which nobody minds.
            if self.has(path) and not (name == "mkdir" and os.path.isdir(path)):
                self.begin(name, path)
            return work(path, *arguments, **options)

        return run

    def _fsync(self, work: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            if descriptor in self._descriptors:
                self.begin("fsync", descriptor)
            work(descriptor)

        return fsync

    def _open(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def opening(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+") or not self.has(file):
                return work(file, mode, *arguments, **options)
            self.begin("open", file)
            opened = work(file, mode, *arguments, **options)
            self._descriptors.add(opened.fileno())
            return _File(opened, self, file)

        return opening


class _File:
    """An open file whose writes are counted."""

    def __init__(self, file: Any, disk: FaultyDisk, path: Any) -> None:
        self._file, self._disk, self._path = file, disk, path

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._disk.begin("write", self._path, half)
        return self._file.write(data)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def temporaries(root: Path) -> list[str]:
    """What a write that failed has left below `root`."""
    return [path.name for path in root.rglob("*") if ".tmp" in path.name]
