"""A card that is not there: what a process does before and after it imports torch.

`load()` comes before the first import of torch in the process. Within `there()` torch's Python
side believes in one card, so that autocast and `GradScaler` are on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.fake_cuda.library import library, torch_folder

ATTENTION = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}

_loaded: list[ctypes.CDLL] = []


def load() -> None:
    """Make torch, when it is imported, one with a CUDA device."""
    assert "torch" not in sys.modules, "the fake card is loaded before torch"
    folder = torch_folder() / "lib"
    first = (*sorted(folder.glob("libgomp*")), folder / "libc10.so", folder / "libtorch_cpu.so")
    for path in first:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _loaded.append(ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL))


def choose_attention(kernel: str) -> None:
    """The kernel that every attention takes from now on, whatever its sizes."""
    _loaded[0].fake_cuda_attention(ctypes.c_int64(ATTENTION[kernel]))


@contextmanager
def there() -> Iterator[None]:
    """Within it, `torch.cuda` says that there is one H100."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    h100 = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=80 << 30,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "_lazy_init": lambda: None,
        "get_device_properties": lambda *_: h100,
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    # With a card a fake mode makes `torch.tensor(..., device="cuda")` real before it fakes it.
    no_memory = property(lambda mode: True, lambda mode, value: None)
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(FakeTensorMode, "avoid_device_init", no_memory, create=True),
    ):
        yield
