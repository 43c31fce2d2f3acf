"""Card: every call to CUDA that the runtime makes, behind one small interface.

Streams, events, copies between them, device memory, pinning. `CudaCard` is torch.cuda; tests bring
a card of their own that keeps its promises on CPU threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from cotrain_compile.errors import CotrainError, HostMemoryError
from cotrain_compile.runtime.bound_ops import copy_all
from cotrain_compile.runtime.cuda.pinned import Event
from cotrain_compile.runtime.process.cores import cores_beside, run_on
from cotrain_compile.support import limits
from cotrain_compile.support.units import format_bytes

Stream = Any

# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1


class StreamsOfCard(Protocol):
    """A device with streams. A stream of None is the one that the step computes on."""

    device: torch.device
    cache_bytes: int  # of the cache that all its kernels share

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

    def copy_all(
        self,
        stream: Stream,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Give `stream` several copies as of `copy`, in their order."""

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

    def reserved_peak_bytes(self) -> int:
        """The most that the allocator had taken from the card since `start_step`."""
        ...

    def give_back(self) -> None:
        """Give memory that the allocator keeps for later back to the card, for other processes."""


# What libraries and the driver say where the card has no memory left, in errors that are not
# torch's own: cuBLAS takes its workspace and cuDNN its plans as they are made, a kernel its code as
# it is loaded.
_OUT_OF_MEMORY = (
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
    "triton error [cuda]: out of memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
)

# The card that `bind_thread` was last called for on each thread; lanes call nothing else there.
_this_thread = threading.local()


class CudaCard:
    """A CUDA device; `cores_beside` are of its memory node, where there are several."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.current_stream(device)
        properties = torch.cuda.get_device_properties(device)
        self.cores_beside = cores_beside(properties)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 0))

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
        self.copy_all(stream, [destination], [source])

    def copy_all(
        self,
        stream: torch.cuda.Stream,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.stream(stream):
                copy_all(destinations, sources, non_blocking=True)
            return
        # As `torch.cuda.stream` does, which asks for more than is needed here.
        before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(stream)
        try:
            copy_all(destinations, sources, non_blocking=True)
        finally:
            torch.cuda.set_stream(before)

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pin(self, row: torch.Tensor) -> None:
        # On all cores, or those of the card's memory node, where the pages then are; the driver
        # would bring them in one by one.
        run_on(self.cores_beside, row.zero_)
        with torch.cuda.device(self.device):
            register = torch.cuda.cudart().cudaHostRegister
            register_pinned(register, row.data_ptr(), row.nbytes, self._launch_a_kernel)

    def _launch_a_kernel(self) -> None:
        # Where it has no memory for its result, the allocator clears the error.
        torch.ones(1, device=self.device)

    def unpin(self, row: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            code = torch.cuda.cudart().cudaHostUnregister(row.data_ptr())
            if int(code) != 0:
                clear_error(self._launch_a_kernel)
            torch.cuda.check_error(code)

    def give_back(self) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def allocated_bytes(self) -> int:
        return self._memory("allocated_bytes", "current")

    def peak_bytes(self) -> int:
        return self._memory("allocated_bytes", "peak")

    def reserved_peak_bytes(self) -> int:
        return self._memory("reserved_bytes", "peak")

    def _memory(self, kind: str, moment: str) -> int:
        # As `torch.cuda.memory_allocated`, which sorts all that the allocator says, twice a step.
        said = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(said.get(kind, {}).get("all", {}).get(moment, 0))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the card has no memory left, whoever says so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, CotrainError):
        return False
    said = str(error).lower()
    return any(text in said for text in _OUT_OF_MEMORY)


def register_pinned(
    register: Callable[[int, int, int], Any], address: int, nbytes: int, clear: Callable[[], object]
) -> None:
    """Pin memory with `register`, the runtime's `cudaHostRegister`.

    `clear` is as of `clear_error`. Raises `HostMemoryError`.
    """
    code = int(register(address, nbytes, _PORTABLE))
    if code != 0:
        clear_error(clear)
        locked = limits.locked_memory_limit_bytes()
        limit = "none" if locked is None else format_bytes(locked)
        raise HostMemoryError(
            f"the driver cannot pin {format_bytes(nbytes)} of host memory (CUDA error {code}; "
            f"limit on locked memory, ulimit -l: {limit}); raise that limit, free host memory, or "
            "set host_memory_budget lower"
        )


def clear_error(launch: Callable[[], object]) -> None:
    """After a call of ours that failed: `launch()` launches a kernel.

    Such a call leaves its error behind, and the launch of the next kernel would raise it, in code
    that has nothing to do with it.
    """
    with suppress(RuntimeError):
        launch()
