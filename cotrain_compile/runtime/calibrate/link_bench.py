"""Link bench: how to time work and copies on each kind of device that can be calibrated.

In: sizes. Out: seconds of a piece of work, the rates of both link directions, or a copy that keeps
running in the background. All that is CUDA about calibration is here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from cotrain_compile.machine import Link

# Work that a clock says took no time took less than it can tell.
_CLOCK_S = 1e-9


@dataclass(frozen=True)
class Sizes:
    """How much to measure with: large enough that caches and start-up costs do not matter.

    Each figure has `repeats` samples behind one that warms up; from `until_s` of the monotonic
    clock on one sample has to do.
    """

    copy_bytes: int = 2**28
    small_copy_bytes: int = 4096
    matmul_side: int = 2048
    updated_parameters: int = 2**24
    exchange_bytes: int = 2**25
    repeats: int = 9
    until_s: float = math.inf

    def least_s(self, seconds: Callable[[], float]) -> float:
        """The least of so many times, see `least_s`."""
        return least_s(seconds, self.repeats, self.until_s)


@dataclass(frozen=True)
class Copies:
    """Both directions of the link: rates alone and together, and the seconds of a tiny copy."""

    h2d: Link
    d2h: Link
    duplex: float
    remark: str = ""


class Bench(Protocol):
    """What differs from one kind of device to another."""

    capacity_bytes: int
    name: str

    def seconds(self, work: Callable[[], object]) -> float:
        """Time of one call of `work`, which computes on the device."""

    def copies(self, sizes: Sizes) -> Copies: ...

    def copying(self, nbytes: int) -> AbstractContextManager[None]:
        """Keep a copy running while the body runs."""


class CpuBench:
    """The emulated device: tensors in RAM, and one copying thread per direction."""

    def __init__(self, host_bytes: int) -> None:
        self.capacity_bytes = host_bytes // 2  # device and host share the memory
        self.name = "an emulated device"

    def seconds(self, work: Callable[[], object]) -> float:
        return wall_s(work)

    def copies(self, sizes: Sizes) -> Copies:
        down, up = _pair(sizes.copy_bytes), _pair(sizes.copy_bytes)
        tiny = _pair(sizes.small_copy_bytes)
        latency_s = sizes.least_s(lambda: _in_threads(tiny))
        down_s = sizes.least_s(lambda: _in_threads(down))
        up_s = sizes.least_s(lambda: _in_threads(up))
        both_s = sizes.least_s(lambda: _in_threads(down, up))
        return _copies(sizes.copy_bytes, latency_s, up_s, down_s, both_s)

    @contextmanager
    def copying(self, nbytes: int) -> Iterator[None]:
        pair = _pair(nbytes)

        def copy() -> None:
            pair[0].copy_(pair[1])

        with _repeating(copy):
            yield


class CudaBench:
    """A CUDA device: events time it, and each direction of the link has a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.capacity_bytes = int(properties.total_memory)
        self.name = str(properties.name)
        self.streams = (_stream(device), _stream(device))

    def seconds(self, work: Callable[[], object]) -> float:
        start, end = (_event() for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def copies(self, sizes: Sizes) -> Copies:
        nbytes = sizes.copy_bytes
        down, up = self._pair(nbytes)[::-1], self._pair(nbytes)
        tiny = self._pair(sizes.small_copy_bytes)
        latency_s = self._least(lambda: self._copy(tiny), sizes)
        down_s = self._least(lambda: self._copy(down), sizes)
        up_s = self._least(lambda: self._copy(up), sizes)
        both_s = self._least(lambda: self._copy(up, down), sizes)
        pageable = (up[0], torch.ones(nbytes, dtype=torch.uint8))
        pageable_s = self._least(lambda: self._copy(pageable), sizes)
        remark = (
            f"copies to the device reach {nbytes / up_s / 1e9:.1f} GB/s from pinned memory and "
            f"{nbytes / pageable_s / 1e9:.1f} GB/s from pageable memory"
        )
        return _copies(nbytes, latency_s, up_s, down_s, both_s, remark)

    @contextmanager
    def copying(self, nbytes: int) -> Iterator[None]:
        pair = self._pair(nbytes)

        def copy() -> None:
            with torch.cuda.stream(self.streams[0]):
                pair[0].copy_(pair[1], non_blocking=True)
            self.streams[0].synchronize()

        with _repeating(copy):
            yield

    def _pair(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer on the device and a pinned one on the host."""
        pinned = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device), pinned

    def _copy(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy second to first of each pair, each on a stream of its own, all at once."""
        current = torch.cuda.current_stream(self.device)
        used = self.streams[: len(pairs)]
        for stream in used:
            stream.wait_stream(current)
        for stream, (destination, source) in zip(used, pairs, strict=True):
            with torch.cuda.stream(stream):
                destination.copy_(source, non_blocking=True)
        # Only now: a stream that waited for `current` after this would wait for the other copy.
        for stream in used:
            current.wait_stream(stream)

    def _least(self, work: Callable[[], object], sizes: Sizes) -> float:
        return sizes.least_s(lambda: self.seconds(work))


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _copies(
    nbytes: int, latency_s: float, up_s: float, down_s: float, both_s: float, remark: str = ""
) -> Copies:
    """Rates from the seconds of one large copy each way and of both together.

    The latency is part of a large copy's time too, but it is below the noise there.
    """
    together = 2 * nbytes / both_s / max(nbytes / up_s, nbytes / down_s)
    return Copies(
        h2d=Link(nbytes / up_s, latency_s),
        d2h=Link(nbytes / down_s, latency_s),
        duplex=min(2.0, max(1.0, together)),
        remark=remark,
    )


@contextmanager
def _repeating(work: Callable[[], None]) -> Iterator[None]:
    """Call `work` over and over on a thread of its own while the body runs."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _in_threads(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Seconds until every pair is copied, each by a thread of its own that is already running."""
    ready = threading.Barrier(len(pairs) + 1)
    done = threading.Barrier(len(pairs) + 1)

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        ready.wait()
        destination.copy_(source)
        done.wait()

    threads = [threading.Thread(target=copy, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    ready.wait()
    start_s = time.perf_counter()
    done.wait()
    seconds = time.perf_counter() - start_s
    for thread in threads:
        thread.join()
    return seconds


def _pair(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Destination and source of a copy, both written to, so that no page is still missing."""
    return torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)


def wall_s(work: Callable[[], object]) -> float:
    """Seconds of one call, by the clock on the wall."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def least_s(seconds: Callable[[], float], repeats: int, until_s: float = math.inf) -> float:
    """The least of `repeats` times: what else a computer does can only make work slower.

    Of fewer where `until_s` of the monotonic clock comes first, of one at the least. One more comes
    before them and is never counted: it loads libraries and chooses algorithms.
    """
    seconds()
    found = [seconds()]
    while len(found) < repeats and time.monotonic() < until_s:
        found.append(seconds())
    return max(min(found), _CLOCK_S)
