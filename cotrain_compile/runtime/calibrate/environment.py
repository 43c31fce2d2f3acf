"""Environment: the settings of this process and computer that decide how well offloading can go.

In: /proc, /sys and the limits of the process. Out: an `Environment`, and remarks in words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cotrain_compile.support import limits


@dataclass(frozen=True)
class Environment:
    """What this process may use of this computer.

    None stands for "not set" (`omp_num_threads`) or "no limit" (the two limits).
    """

    omp_num_threads: str | None
    machine_cores: int
    usable_cores: int
    installed_memory_bytes: int
    memory_limit_bytes: int | None
    locked_memory_limit_bytes: int | None
    numa_nodes: int
    cuda: bool
    processes: int = 1

    def shared_by(self, processes: int) -> Environment:
        """The same where so many processes train on this computer."""
        return replace(self, processes=processes)

    @property
    def usable_memory_bytes(self) -> int:
        """This process's share of the installed memory, or of the limit where that is lower."""
        limit, installed = self.memory_limit_bytes, self.installed_memory_bytes
        return (installed if limit is None else min(installed, limit)) // self.processes


def read_environment() -> Environment:
    """The environment of this process, from /proc, /sys and the process's limits."""
    return Environment(
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        machine_cores=os.cpu_count() or 1,
        usable_cores=limits.usable_core_count(),
        installed_memory_bytes=limits.installed_memory_bytes(),
        memory_limit_bytes=limits.cgroup_memory_limit_bytes(),
        locked_memory_limit_bytes=limits.locked_memory_limit_bytes(),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        cuda=torch.cuda.is_available(),
    )


def environment_remarks(environment: Environment) -> tuple[str, ...]:
    """What in this environment slows offloading down or could not be measured, and what to do."""
    remarks = []
    if not environment.cuda:
        remarks.append(
            "no CUDA device: the link is a memory copy on another thread; a real link and pinned "
            "copies could not be measured"
        )
    if environment.omp_num_threads == "1" and environment.usable_cores > 1:
        remarks.append(
            f"OMP_NUM_THREADS=1: host updates run on one of {environment.usable_cores} cores; "
            "unset it (torchrun sets it) or set it to the number of cores"
        )
    if environment.usable_cores < environment.machine_cores:
        remarks.append(
            f"this process may use {environment.usable_cores} of {environment.machine_cores} "
            "cores (CPU affinity or cgroup quota); host updates have no more than these"
        )
    limit = environment.memory_limit_bytes
    if limit is not None and limit < environment.installed_memory_bytes:
        remarks.append(
            f"the cgroup allows {_gib(limit)} of {_gib(environment.installed_memory_bytes)} of "
            "memory; going beyond kills the process, so keep the host budget below it"
        )
    locked = environment.locked_memory_limit_bytes
    if locked is not None and locked < environment.installed_memory_bytes:
        remarks.append(
            f"at most {_gib(locked)} may be locked in memory (ulimit -l): pinning more than that "
            "can fail; raise the limit to train with large pinned buffers"
        )
    if environment.numa_nodes > 1:
        remarks.append(
            f"{environment.numa_nodes} NUMA nodes: copies and updates are fastest on the node "
            "beside the device; bind the process to it (numactl --cpunodebind --membind)"
        )
    return tuple(remarks)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
