"""Limits: how many cores and how much memory this process may use, by Linux and its cgroups."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def usable_core_count() -> int:
    """Cores this process may run on: its affinity, cut by the cgroup's CPU quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def usable_memory_bytes() -> int:
    """Memory of this computer, or the cgroup's limit where that is lower."""
    limit = cgroup_memory_limit_bytes()
    return installed_memory_bytes() if limit is None else min(installed_memory_bytes(), limit)


def installed_memory_bytes() -> int:
    """MemTotal of /proc/meminfo."""
    with open("/proc/meminfo") as lines:
        kib = next(line.split()[1] for line in lines if line.startswith("MemTotal:"))
    return int(kib) * 1024


def cgroup_memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The lowest memory limit that a cgroup (version 2 or 1) sets; None if it sets none."""
    found = [
        int(text)
        for name in ("memory.max", "memory/memory.limit_in_bytes")
        if (text := _text(root / name)).isdigit()
    ]
    # Version 1 writes "no limit" as the largest multiple of a page that fits 63 bits.
    limits = [limit for limit in found if limit < 2**62]
    return min(limits, default=None)


def locked_memory_limit_bytes() -> int | None:
    """What this process may lock in memory (`ulimit -l`); None if there is no limit."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if locked == resource.RLIM_INFINITY else locked


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU quota of the cgroup (version 2 or 1) in cores; None if there is none."""
    quota, _, period = _text(root / "cpu.max").partition(" ")
    if not period:
        quota = _text(root / "cpu/cpu.cfs_quota_us")
        period = _text(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(path: Path) -> str:
    """A small system file, "" where this computer has none of that name."""
    return path.read_text().strip() if path.is_file() else ""


def processes_here() -> int:
    """How many processes torchrun has started on this computer; 1 where it has not."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1
