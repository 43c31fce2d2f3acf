"""Pinned memory: slabs of host memory for homes and for what comes down, used again and again.

A slab is a mapping of its own and as large as asked for, up to a page: torch's pinned allocator
rounds up to powers of two. When the last tensor on a slab dies, it goes back to the pool, with the
events of the copies that may still be at work on it; who writes to it next has to let those pass.
What pins a slab, and what an event is, is given; nothing here knows of CUDA.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from cotrain_compile import presets
from cotrain_compile.errors import HostMemoryError
from cotrain_compile.units import format_bytes

# Left to the rest of the computer, however little is free.
RESERVE_BYTES = 2**30


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Return when it has come."""
        ...


# The step's thread and one of the host may issue copies of one slab.
_noting = threading.Lock()


@dataclass(eq=False)
class Slab:
    """A stretch of pinned host memory, and the copies that may still read or write it."""

    memory: mmap.mmap
    events: list[Event] = field(default_factory=list)

    def note(self, event: Event) -> None:
        """A copy that reads or writes it ends with `event`."""
        with _noting:
            under_way = [other for other in self.events if not other.query()]
            self.events = [event, *under_way]


class _Lent(weakref.ref[torch.UntypedStorage]):
    """A storage that lies on a slab of `nbytes`."""

    __slots__ = ("key", "nbytes", "slab")

    key: int
    nbytes: int
    slab: Slab


class PinnedPool:
    """Hands out tensors on pinned slabs.

    `pin(row)` pins the memory of a new one, `unpin(row)` undoes it. `available_bytes` says how
    much memory may still be taken; below 1 MiB nobody asks. Where it is not enough, slabs that
    nobody uses are given back to the computer.
    """

    def __init__(
        self,
        pin: Callable[[torch.Tensor], None],
        unpin: Callable[[torch.Tensor], None],
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.held_bytes = 0
        self.unpinned = 0  # slabs so far
        self._pin, self._unpin = pin, unpin
        self._available_bytes = available_bytes or available_host_bytes
        self._free: dict[int, deque[Slab]] = defaultdict(deque)
        self._lent: dict[int, _Lent] = {}
        # Whose storage has died. No function of Python's is called then, at any moment and on any
        # thread: it might stop between two lines, or lose a Ctrl-C.
        self._died: deque[_Lent] = deque()

    def empty(self, nbytes: int) -> torch.Tensor:
        """A row of `nbytes` bytes on a slab of that size.

        Raises `HostMemoryError` where this computer has not so much left.
        """
        return self._row(nbytes, torch.uint8)

    def empty_like(self, row: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `torch.empty_like`, for a dense tensor."""
        made = self._row(row.numel(), dtype or row.dtype)
        return made if row.dim() == 1 else made.as_strided(row.size(), row.stride())

    def _row(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = elements * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        self._take_what_died()
        slab = self._take_back(nbytes) or self._new(nbytes)
        row = torch.frombuffer(slab.memory, dtype=dtype, count=elements)
        storage = row.untyped_storage()
        lent = _Lent(storage, self._died.append)
        lent.key, lent.slab, lent.nbytes = storage._cdata, slab, nbytes
        # A storage that has died meanwhile may have had this key: it must not take the slab along.
        self._lent[lent.key] = lent
        return row

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on a slab of this pool."""
        return self.slab_of(tensor) is not None

    def note(self, tensor: torch.Tensor, event: Event) -> None:
        """A copy that reads or writes `tensor` ends with `event`."""
        slab = self.slab_of(tensor)
        if slab is not None:
            slab.note(event)

    def pending(self, tensor: torch.Tensor) -> list[Event]:
        """What a writer to `tensor` has to let pass first."""
        slab = self.slab_of(tensor)
        return list(slab.events) if slab is not None else []

    def slab_of(self, tensor: torch.Tensor) -> Slab | None:
        """The slab of this pool that `tensor` lies on, if any."""
        lent = self._lent.get(tensor.untyped_storage()._cdata)
        # Of a storage that has died, another may have the place in memory, which is the key.
        return lent.slab if lent is not None and lent() is not None else None

    def release(self) -> None:
        """Unpin and free the slabs that nobody uses, when the copies on them are done."""
        self._take_what_died()
        for nbytes in list(self._free):
            while (slab := self._take_back(nbytes)) is not None:
                for event in slab.events:
                    event.synchronize()
                self._unpin(torch.frombuffer(slab.memory, dtype=torch.uint8))
                self.held_bytes -= nbytes
                self.unpinned += 1

    def _take_back(self, nbytes: int) -> Slab | None:
        try:
            return self._free[nbytes].pop()
        except IndexError:
            return None

    def _take_what_died(self) -> None:
        while self._died:
            try:
                lent = self._died.popleft()
            except IndexError:
                return  # another thread took it
            if self._lent.get(lent.key) is lent:
                del self._lent[lent.key]
            self._free[lent.nbytes].append(lent.slab)

    def _new(self, nbytes: int) -> Slab:
        if nbytes >= 2**20:
            if nbytes > self._available_bytes():
                self.release()
            self._refuse_too_much(nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pin(torch.frombuffer(memory, dtype=torch.uint8))
        self.held_bytes += nbytes
        return Slab(memory)

    def _refuse_too_much(self, nbytes: int) -> None:
        available = self._available_bytes()
        if nbytes > available:
            raise HostMemoryError(
                f"{format_bytes(nbytes)} of pinned host memory are needed on top of "
                f"{format_bytes(self.held_bytes)} that are pinned already, but only "
                f"{format_bytes(max(0, available))} can be taken (memory free now and the cgroup's "
                f"limit, less {format_bytes(RESERVE_BYTES)}); free host memory, raise the limit of "
                "the container, or set host_memory_budget lower"
            )


def available_host_bytes() -> int:
    """Bytes of host memory that this process may still take, within the cgroup's limit."""
    free = _free_memory_bytes()
    limit = presets.cgroup_memory_limit_bytes()
    if limit is not None:
        free = min(free, limit - _cgroup_used_bytes())
    return free - RESERVE_BYTES


def _free_memory_bytes() -> int:
    with open("/proc/meminfo") as lines:
        kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) * 1024


def _cgroup_used_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What the cgroup counts but for file caches, which it gives up under pressure."""
    for usage, stat, cache in (
        ("memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        if (root / usage).is_file():
            lines = (root / stat).read_text().splitlines()
            cached = sum(int(n) for name, n in map(str.split, lines) if name == cache)
            return int((root / usage).read_text()) - cached
    return 0
