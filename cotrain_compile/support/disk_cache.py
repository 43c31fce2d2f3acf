"""Disk cache: where what one process found is kept for the next, and how much of it.

The folder is `COTRAIN_CACHE_DIR`, none where that is empty, else that of caches by the XDG base
directory specification; what is kept of one sort is in a folder below. What was used last stays.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

VARIABLE = "COTRAIN_CACHE_DIR"
# Nobody still writes a file that was begun so long ago.
LONGEST_WRITE_S = 3600.0


def folder_of(sort: str) -> Path | None:
    """Where what is kept of this sort is, such as "plans"; None where nothing is kept."""
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        return Path(asked) / sort if asked else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cotrain_compile" / sort


def private_folder(sort: str) -> Path | None:
    """The folder of this sort, made if need be, for what is executed or says what is.

    None where nothing is kept, or anybody but this user may write to it.
    """
    folder = folder_of(sort)
    if folder is None:
        return None
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder if _is_ours(folder, stat.S_ISDIR) else None


def is_only_ours(path: Path) -> bool:
    """Whether the file `path` and its folder are this user's, and nobody else may write to them.

    False where one of them is missing, or is a link.
    """
    return _is_ours(path.parent, stat.S_ISDIR) and _is_ours(path, stat.S_ISREG)


def _is_ours(path: Path, is_its_kind: Callable[[int], bool]) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    written_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_its_kind(status.st_mode) and status.st_uid == os.geteuid() and not written_by_others


def keep_at_most(folder: Path, most_bytes: int) -> None:
    """Delete the files of `folder` that were not used for longest, up to `most_bytes` of others.

    Also what writers have left that were killed: see `files.write_whole`.
    """
    for left in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LONGEST_WRITE_S:
                left.unlink()
    kept = sorted(folder.glob("[!.]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in kept:
        total += path.stat().st_size
        if total > most_bytes:
            path.unlink(missing_ok=True)


@cache
def package_digest() -> str:
    """Of this package, as its source is here: what another one found may be found otherwise."""
    source = hashlib.sha256()
    # In a checkout some folders of the package are links, which `Path.rglob` passes by.
    for folder, _, names in sorted(os.walk(Path(__file__).parents[1], followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                source.update(Path(folder, name).read_bytes())
    return source.hexdigest()
