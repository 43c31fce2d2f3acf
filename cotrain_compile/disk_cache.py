"""Disk cache: where what one process found is kept for the next, and how much of it.

The folder is `COTRAIN_CACHE_DIR`, none where that is empty, else that of caches by the XDG base
directory specification; what is kept of one sort is in a folder below. What was used last stays.
"""

from __future__ import annotations

import hashlib
import os
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
