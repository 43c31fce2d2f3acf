"""Disk cache: where what one process found is kept for the next, and how much of it.

The folder is `COTRAIN_CACHE_DIR`, none where that is empty, else that of caches by the XDG base
directory specification; what is kept of one sort is in a folder below. What was used last stays.
"""

from __future__ import annotations

import hashlib
import os
import stat
from functools import cache
from pathlib import Path

VARIABLE = "COTRAIN_CACHE_DIR"


def folder_of(sort: str) -> Path | None:
    """Where what is kept of this sort is, such as "plans"; None where nothing is kept."""
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        return Path(asked) / sort if asked else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cotrain_compile" / sort


def is_only_ours(path: Path) -> bool:
    """Whether `path` and its folder are this user's, and nobody else may write to them.

    For what is executed and not only read; false where one of them is missing, or is a link.
    """
    for part in (path.parent, path):
        try:
            status = part.lstat()
        except OSError:
            return False
        others = stat.S_IWGRP | stat.S_IWOTH
        if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & others:
            return False
    return True


def keep_at_most(folder: Path, most_bytes: int) -> None:
    """Delete the files of `folder` that were not used for longest, up to `most_bytes` of others."""
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
    for folder, _, names in sorted(os.walk(Path(__file__).parent, followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                source.update(Path(folder, name).read_bytes())
    return source.hexdigest()
