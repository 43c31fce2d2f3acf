"""Allocations: what compiled code takes and gives back inside, which no tensor of ours shows.

Torch's own allocators report to a profiler of the calling thread; what other threads do meanwhile
is not in it. Private torch API used: `_enable_profiler_legacy`, which takes microseconds where
`torch.profiler` takes a tenth of a second. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import accumulate
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_autograd: Any = torch.autograd  # where torch re-exports its profiler without saying so


def unprofiled(run: Callable[[], Result]) -> Result:
    """What `run()` returns: here, or where a profiler of the user's is on in a thread of its own.

    Two profilers in one thread there cannot be, and `most_allocated` is one. The user's does not
    see what `run` does then.
    """
    if not is_profiled():
        return run()
    context = copy_context()
    with ThreadPoolExecutor(1, "cotrain-dry run") as thread:
        return thread.submit(lambda: context.run(run)).result()


def is_profiled() -> bool:
    """Whether a profiler of the user's runs in this thread."""
    return bool(_autograd._profiler_enabled())


def most_allocated(run: Callable[[], Result]) -> tuple[Result, int]:
    """What `run()` returns, and the most bytes it held on the CPU beyond those at its start."""
    state, experimental = _autograd.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()
    settings = _autograd.ProfilerConfig(state, False, True, False, False, False, experimental)
    _autograd._enable_profiler_legacy(settings)
    try:
        result = run()
    finally:
        records: Any = _autograd._disable_profiler_legacy()
    changes = [event.cpu_memory_usage() for thread in records for event in thread]
    return result, max(accumulate(changes), default=0)
