"""`torch.cuda` as `CudaCard` calls it, over a card of threads: for a torch that is built without.

In: a `ThreadCard`. Out: within `mocked`, a `CudaCard` whose streams and events are that card's, and
the calls by which the driver was asked. The allocator, and `record_stream`, are those of nobody: a
CUDA build of torch runs them on `tests/stub_card`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cotrain_compile.runtime.cuda import card as cuda_card
from cotrain_compile.runtime.cuda.card import CudaCard
from tests.support.thread_card import ThreadCard, ThreadEvent

MEMORY = {
    "allocated_bytes": {"all": {"current": 3, "peak": 5}},
    "reserved_bytes": {"all": {"current": 7, "peak": 11}},
}
NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


class MockedCuda:
    """The functions of `torch.cuda`, by their names there; `current` is the stream at hand."""

    def __init__(self, threads: ThreadCard) -> None:
        self.threads = threads
        self.compute = self.current = MockedStream(self, of_the_step=True)
        self.device_at_hand: int | None = None
        self.kernels = self.emptied = 0

    def names(self) -> dict[str, Any]:
        registers = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._free)
        return {
            "Stream": lambda _: MockedStream(self),
            "Event": lambda **how: MockedEvent(self, **how),
            "current_stream": lambda _: self.current,
            "get_device_properties": lambda _: SimpleNamespace(),
            "set_stream": self._set_stream,
            "stream": self._on,
            "current_device": lambda: self.device_at_hand,
            "set_device": lambda device: self.threads.bind_thread(),
            "device": lambda _: nullcontext(),
            "synchronize": lambda _: self.threads.synchronize(),
            "reset_peak_memory_stats": lambda _: self.threads.start_step(),
            "memory_stats_as_nested_dict": lambda _: MEMORY,
            "empty_cache": self._empty_cache,
            "cudart": lambda: registers,
            "check_error": _check_error,
        }

    def copy_all(
        self, destinations: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool
    ) -> None:
        """What a copy that does not block does: it is given to the stream at hand."""
        assert non_blocking
        self.threads.copy_all(self.current.raw, destinations, sources)

    def launch(self, *_: object, **__: object) -> None:
        self.kernels += 1
        self.threads._launch()

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        return self.threads._register(address, nbytes, flags)

    def _free(self, address: int) -> int:
        if self.threads.pinned.pop(address, None) is None:
            self.threads._last_error = NOT_REGISTERED
            return NOT_REGISTERED
        return 0

    def _empty_cache(self) -> None:
        self.emptied += 1

    def _set_stream(self, stream: MockedStream) -> None:
        self.current = stream

    @contextmanager
    def _on(self, stream: MockedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class MockedStream:
    def __init__(self, cuda: MockedCuda, *, of_the_step: bool = False) -> None:
        self._threads = cuda.threads
        self.raw = None if of_the_step else cuda.threads.stream()

    def wait_event(self, event: MockedEvent) -> None:
        assert event.raw is not None
        self._threads.hold(self.raw, event.raw)


class MockedEvent:
    """One that has not been recorded has come, as torch's has."""

    def __init__(self, cuda: MockedCuda, *, enable_timing: bool, blocking: bool) -> None:
        assert blocking
        self._threads, self._timed = cuda.threads, enable_timing
        self.raw: ThreadEvent | None = None

    def record(self, stream: MockedStream) -> None:
        self.raw = self._threads.record(stream.raw)

    def query(self) -> bool:
        return self.raw is None or self.raw.query()

    def synchronize(self) -> None:
        if self.raw is not None:
            self.raw.synchronize()

    def elapsed_time(self, end: MockedEvent) -> float:
        assert self._timed
        assert end._timed
        return 1e3 * self._threads.seconds_between(self.raw, end.raw)


def _check_error(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


@contextmanager
def mocked(threads: ThreadCard) -> Iterator[tuple[CudaCard, MockedCuda]]:
    """Within it, a `CudaCard` whose device is the CPU, and what it calls."""
    cuda = MockedCuda(threads)
    with (
        mock.patch.multiple(torch.cuda, **cuda.names()),
        mock.patch.object(cuda_card, "copy_all", cuda.copy_all),
        mock.patch.object(CudaCard, "_launch_a_kernel", cuda.launch),
    ):
        yield CudaCard(torch.device("cpu")), cuda
