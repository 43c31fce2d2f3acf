"""Pinned memory: slabs of host memory for homes and for what comes down, used again and again.

A slab is as large as asked for: torch's pinned allocator rounds up to powers of two. Each is a
mapping of its own, but for those that are asked for together: these share mappings of up to a
gigabyte, since to pin each takes a call to the driver. When the last tensor on a slab dies, it goes
back to the pool, with the events of the copies that may still be at work on it; who writes to it
next has to let those pass.

A process that is forked from this one has no copy of them: the kernel would copy pinned pages at
once for each worker of a DataLoader, or, before Linux 5.12, at the next write of this process,
which would go to another page than the card reads. Large ones are of huge pages where the kernel
has some: to pin pages of 4 KiB takes tens of seconds for 100 GB.

What pins a slab, and what an event is, is given; nothing here knows of CUDA.
"""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from cotrain_compile.errors import HostMemoryError
from cotrain_compile.support import limits
from cotrain_compile.support.units import format_bytes

# Slabs that are asked for together share mappings of this size, and begin at a multiple of this.
MAPPING_BYTES = 2**30
ALIGNMENT = 512
HUGE_PAGE_BYTES = 2**21
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
class Mapping:
    """Pinned host memory of `nbytes`, cut into `slabs`."""

    memory: mmap.mmap
    nbytes: int
    slabs: int


@dataclass(eq=False)
class Slab:
    """A stretch of pinned host memory, and the copies that may still read or write it."""

    mapping: Mapping
    offset: int = 0
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

    def reserve(self, sizes: Sequence[int]) -> None:
        """Pin memory for slabs of these sizes in few calls, for those that are not there yet.

        The caller asks for some `MAPPING_BYTES` at a time. Raises as `empty`.
        """
        self._take_what_died()
        missing = Counter(n for n in sizes if n)
        for nbytes in missing:
            missing[nbytes] -= len(self._free[nbytes])
        wanted = list(missing.elements())
        if wanted:
            for slab, nbytes in zip(self._mapped(wanted), wanted, strict=True):
                self._free[nbytes].append(slab)

    def empty_like(self, row: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `torch.empty_like`, for a dense tensor."""
        made = self._row(row.numel(), dtype or row.dtype)
        return made if row.dim() == 1 else made.as_strided(row.size(), row.stride())

    def _row(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = elements * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        self._take_what_died()
        slab = self._take_back(nbytes) or self._mapped([nbytes])[0]
        row = torch.frombuffer(slab.mapping.memory, dtype=dtype, count=elements, offset=slab.offset)
        storage = row.untyped_storage()
        lent = _Lent(storage, self._died.append)
        lent.slab, lent.nbytes, lent.key = slab, nbytes, storage._cdata
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
        """Unpin and free the mappings whose slabs nobody uses, when the copies on them are done."""
        self._take_what_died()
        unused: dict[Mapping, list[tuple[int, Slab]]] = defaultdict(list)
        for nbytes in list(self._free):
            while (slab := self._take_back(nbytes)) is not None:
                unused[slab.mapping].append((nbytes, slab))
        for mapping, slabs in unused.items():
            if len(slabs) < mapping.slabs:
                for nbytes, slab in slabs:
                    self._free[nbytes].append(slab)
                continue
            for event in (event for _, slab in slabs for event in slab.events):
                event.synchronize()
            self._unpin(torch.frombuffer(mapping.memory, dtype=torch.uint8))
            self.held_bytes -= mapping.nbytes
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
            if not hasattr(lent, "key"):
                continue  # an interrupt came before it was lent
            if self._lent.get(lent.key) is lent:
                del self._lent[lent.key]
            self._free[lent.nbytes].append(lent.slab)

    def _mapped(self, sizes: Sequence[int]) -> list[Slab]:
        """New slabs of these sizes on one mapping."""
        offsets, nbytes = list[int](), 0
        for size in sizes:
            offsets.append(-(-nbytes // ALIGNMENT) * ALIGNMENT)
            nbytes = offsets[-1] + size
        if nbytes >= 2**20:
            if nbytes > self._available_bytes():
                self.release()
            self._refuse_too_much(nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(memory, mmap.MADV_DONTFORK, "is copied for each process that is forked")
        if nbytes >= HUGE_PAGE_BYTES:
            _advise(memory, mmap.MADV_HUGEPAGE, "is in pages of 4 KiB, which takes long to pin")
        self._pin(torch.frombuffer(memory, dtype=torch.uint8))
        self.held_bytes += nbytes
        mapping = Mapping(memory, nbytes, len(sizes))
        return [Slab(mapping, offset) for offset in offsets]

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


def _advise(memory: mmap.mmap, advice: int, without: str) -> None:
    """Tell the kernel how `memory` is used; it works without, and then says what that means."""
    try:
        memory.madvise(advice)
    except OSError as error:
        warnings.warn(
            f"cotrain: pinned host memory {without}: this kernel does not take the advice "
            f"({error.strerror}); the step runs all the same",
            stacklevel=2,
        )


def available_host_bytes() -> int:
    """Bytes of host memory that this process may still take, within the cgroup's limit."""
    free = _free_memory_bytes()
    limit = limits.cgroup_memory_limit_bytes()
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
