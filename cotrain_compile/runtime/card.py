"""Card: every call to CUDA that the runtime makes, behind one small interface.

Streams, events, copies between them, device memory, pinning. `CudaCard` is torch.cuda; tests bring
a card of their own that keeps its promises on CPU threads.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from cotrain_compile.errors import HostMemoryError
from cotrain_compile.runtime.pinned import Event
from cotrain_compile.units import format_bytes

Stream = Any

# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1


class Card(Protocol):
    """A device with streams. A stream of None is the one that the step computes on."""

    device: torch.device

    def start_step(self) -> None:
        """Note the stream that this thread computes on, and count peaks from here."""

    def bind_thread(self) -> None:
        """Let this thread work on the card: a new one would work on the first card there is."""

    def stream(self) -> Stream:
        """A new stream for copies."""

    def record(self, stream: Stream | None, *, timed: bool = False) -> Event:
        """An event that comes when all work given to `stream` so far is done."""
        ...

    def hold(self, stream: Stream | None, event: Any) -> None:
        """What is given to `stream` from now on starts after `event`."""

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Give `stream` a copy between the device and pinned memory."""

    def seconds_between(self, start: Event, end: Event) -> float:
        """Between two timed events that have both come."""
        ...

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    def pin(self, row: torch.Tensor) -> None:
        """Pin the memory of `row`, until `unpin`."""

    def unpin(self, row: torch.Tensor) -> None:
        """Undo `pin`; no copy is under way."""

    def allocated_bytes(self) -> int:
        """Bytes of the device's live tensors."""
        ...

    def peak_bytes(self) -> int:
        """The most since `start_step`."""
        ...


# The card that `bind_thread` was last called for on each thread; lanes call nothing else there.
_this_thread = threading.local()


class CudaCard:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.current_stream(device)

    def start_step(self) -> None:
        self._compute = torch.cuda.current_stream(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def bind_thread(self) -> None:
        if getattr(_this_thread, "device", None) != self.device:
            torch.cuda.set_device(self.device)
            _this_thread.device = self.device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def record(self, stream: torch.cuda.Stream | None, *, timed: bool = False) -> torch.cuda.Event:
        # Blocking: a host worker that waits for it sleeps, its core is needed for updates.
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(stream or self._compute)
        return event

    def hold(self, stream: torch.cuda.Stream | None, event: Any) -> None:
        (stream or self._compute).wait_event(event)

    def copy(
        self, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor
    ) -> None:
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.stream(stream):
                destination.copy_(source, non_blocking=True)
            return
        # As `torch.cuda.stream` does, which asks for more than is needed here.
        before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(stream)
        try:
            destination.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(before)

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pin(self, row: torch.Tensor) -> None:
        row.zero_()  # on all cores; the driver would bring the pages in one by one
        with torch.cuda.device(self.device):
            _call(torch.cuda.cudart().cudaHostRegister, row.data_ptr(), row.nbytes, _PORTABLE)

    def unpin(self, row: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(row.data_ptr()))

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))


def _call(register: Callable[..., Any], address: int, nbytes: int, flags: int) -> None:
    code = int(register(address, nbytes, flags))
    if code != 0:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "none" if locked == resource.RLIM_INFINITY else format_bytes(locked)
        raise HostMemoryError(
            f"the driver cannot pin {format_bytes(nbytes)} of host memory (CUDA error {code}; "
            f"limit on locked memory, ulimit -l: {limit}); raise that limit, free host memory, or "
            "set host_memory_budget lower"
        )
