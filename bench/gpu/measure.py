"""Measuring a step on a card: seconds, the allocator's peak, and how much of the time it computes.

In: a function that runs one step. Out: a part of a row of `bench.gpu.suite`. On the CPU there are
seconds only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# What the profiler calls copies and fills: they do not compute.
COPIES = ("Memcpy", "Memset")


def measured(run: Callable[[], Any], device: str, repeats: int) -> dict[str, Any]:
    """Seconds of `repeats` runs, their peak in the allocator, and the busy share of one more."""
    on_card = device == "cuda"
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    seconds = [_seconds(run, on_card) for _ in range(repeats)]
    found: dict[str, Any] = {"measured_s": statistics.median(seconds), "seconds": seconds}
    if on_card:
        found["allocator_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["busy"] = busy_of(run)
    return found


def _seconds(run: Callable[[], Any], on_card: bool) -> float:
    if on_card:
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if on_card:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def busy_of(run: Callable[[], Any]) -> float:
    """The share of a run in which at least one kernel computes, by the profiler's events."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        seconds = _seconds(run, on_card=True)
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type.name == "CUDA" and not event.name.startswith(COPIES)
    ]
    return covered(kernels) / (1e6 * seconds)  # the profiler counts in microseconds


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of `spans` (start, end), in their unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
