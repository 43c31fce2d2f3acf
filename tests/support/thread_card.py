"""A card on CPU threads: streams, events and freed memory as CUDA's, so that their misuse shows.

A stream is a thread that does what it is given in order, some of it late. The stream that the step
computes on is the step's own thread. A copy does not keep its tensors alive, as a DMA does not:
`faults` has the memory of the device that was freed before the compute stream had waited for it.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from cotrain_compile.runtime.cuda.card import register_pinned

LONGEST_DELAY_S = 2e-3
INVALID_VALUE = 1  # cudaErrorInvalidValue


class ThreadEvent:
    def __init__(self) -> None:
        self.come = threading.Event()
        self.at_s = 0.0
        self.synchronizes = 0

    def set(self) -> None:
        self.at_s = time.perf_counter()
        self.come.set()

    def query(self) -> bool:
        return self.come.is_set()

    def synchronize(self) -> None:
        self.synchronizes += 1
        assert self.come.wait(20), "an event never came"


class ThreadStream:
    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.copies: list[_Copy] = []
        threading.Thread(target=_run, args=(self.work,), daemon=True).start()
        weakref.finalize(self, self.work.put, None)


def _run(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (do := work.get()) is not None:
        do()


class _Copy:
    """A copy that has been given to a stream; `end` is the event after it."""

    def __init__(self) -> None:
        self.ended_in_order = False
        self.end: ThreadEvent | None = None


class ThreadCard:
    """A card whose memory is the CPU's. `seed` is for the delays of its copies."""

    device = torch.device("cpu")
    cache_bytes = 0

    def __init__(self, seed: int = 0) -> None:
        self.faults: list[str] = []
        self.pinned: dict[int, int] = {}  # bytes by address
        self.pins_left = -1  # how many calls of `pin` go well; below 0 all do
        self._last_error = 0
        self.peak = 0  # what its allocator says
        # What first calls of kernels and libraries take beside that: to be tuned, and for good.
        self.tuning_bytes = self.kept_bytes = 0
        # What its allocator has reserved beside tensors: of what is planned, and kept for later.
        self.pieces_bytes: Callable[[], int] = lambda: 0
        self.cached_bytes = 0
        self._steps = self.given_back = 0
        self.bound: set[int] = set()  # threads that work for the card
        self._random = random.Random(seed)
        self._streams: list[ThreadStream] = []

    def start_step(self) -> None:
        self._steps += 1
        for stream in self._streams:
            stream.copies = []

    def bind_thread(self) -> None:
        self.bound.add(threading.get_ident())

    def stream(self) -> ThreadStream:
        self._streams.append(ThreadStream())
        return self._streams[-1]

    def record(self, stream: Any, *, timed: bool = False) -> ThreadEvent:
        event = ThreadEvent()
        if stream is None:
            event.set()  # what the step's thread has called is done
            return event
        for copy in stream.copies:
            copy.end = copy.end or event
        stream.work.put(event.set)
        return event

    def hold(self, stream: Any, event: Any) -> None:
        if stream is not None:
            stream.work.put(lambda: event.synchronize())
            return
        event.synchronize()
        for copies in (s.copies for s in self._streams):
            for copy in copies:
                copy.ended_in_order |= copy.end is event

    def copy(self, stream: Any, destination: Tensor, source: Tensor) -> None:
        self._launch()
        copy, delay_s = _Copy(), self._random.random() * LONGEST_DELAY_S
        stream.copies.append(copy)
        span = _span(destination), _span(source)
        assert span[0][1] == span[1][1], "a copy between tensors of different size"
        assert destination.stride() == source.stride(), "a copy between different layouts"
        on_device = [t for t in (destination, source) if not self._is_pinned(t)]
        assert len(on_device) == 1, "a copy is between the device and pinned memory"
        storage = self._watch(on_device[0], copy)

        def move() -> None:
            if storage() is not None:
                ctypes.memset(span[0][0], 0xFF, span[0][1])  # NaN, in every float format
                time.sleep(delay_s)
            if storage() is not None:
                ctypes.memmove(span[0][0], span[1][0], span[0][1])

        stream.work.put(move)

    def copy_all(
        self, stream: Any, destinations: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            self.copy(stream, destination, source)

    def _watch(self, tensor: Tensor, copy: _Copy) -> weakref.ref[Any]:
        """Note a fault when the memory of `tensor` is freed too early."""
        size = f"{tensor.nbytes} bytes"

        def freed(_: object) -> None:
            came = copy.end is not None and copy.end.query()
            if not copy.ended_in_order and not came:
                self.faults.append(f"{size} were freed before the copy was waited for")

        return weakref.ref(tensor.untyped_storage(), freed)

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(end.at_s - start.at_s)

    def synchronize(self) -> None:
        for stream in self._streams:
            self.record(stream).synchronize()

    def pin(self, row: Tensor) -> None:
        register_pinned(self._register, row.data_ptr(), row.nbytes, self._launch)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        if self.pins_left == 0:
            self._last_error = INVALID_VALUE
            return INVALID_VALUE
        self.pins_left -= 1
        self.pinned[address] = nbytes
        return 0

    def _launch(self) -> None:
        """As the launch of any kernel: an error that a call before it has left comes out here."""
        code, self._last_error = self._last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}, of some call before this one")

    def unpin(self, row: Tensor) -> None:
        del self.pinned[row.data_ptr()]

    def _is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(start <= at < start + nbytes for start, nbytes in self.pinned.items())

    def give_back(self) -> None:
        self.given_back += 1
        self.cached_bytes = 0

    def allocated_bytes(self) -> int:
        return self.kept_bytes if self._steps > 1 else 0

    def peak_bytes(self) -> int:
        return self.peak + self.kept_bytes + (self.tuning_bytes if self._steps == 1 else 0)

    def reserved_peak_bytes(self) -> int:
        return self.peak_bytes() + self.pieces_bytes() + self.cached_bytes


def _span(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of a dense tensor."""
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    elements = elements if tensor.numel() else 0
    assert elements == tensor.numel(), "a copy of a tensor with gaps"
    return tensor.data_ptr(), elements * tensor.element_size()
