"""A card that is not there: what a process does before and after it imports torch.

`load()` comes before the first import of torch in the process. Within `there()` torch's Python
side believes in one card, so that autocast and `GradScaler` are on. A torch that is built with CUDA
brings a guard and hooks of its own: there the card is the one that `trace` puts in their place.
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
_chosen = [0]


def load() -> None:
    """Make torch, when it is imported, one with a CUDA device."""
    assert "torch" not in sys.modules, "the fake card is loaded before torch"
    if has_cuda():
        return
    folder = torch_folder() / "lib"
    first = (*sorted(folder.glob("libgomp*")), folder / "libc10.so", folder / "libtorch_cpu.so")
    for path in first:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _loaded.append(ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL))


def has_cuda() -> bool:
    """Whether torch, which is not imported for it, is built with CUDA."""
    return (torch_folder() / "lib" / "libtorch_cuda.so").exists()


def choose_attention(kernel: str) -> None:
    """The kernel that every attention takes from now on, whatever its sizes."""
    _chosen[0] = ATTENTION[kernel]
    for loaded in _loaded:
        loaded.fake_cuda_attention(ctypes.c_int64(ATTENTION[kernel]))


@contextmanager
def there() -> Iterator[None]:
    """Within it, `torch.cuda` says that there is one H100."""
    import torch

    from cotrain_compile.capture.offline.absent_card import constants_on_the_host

    if has_cuda():
        with _in_place_of_cuda():
            yield
        return
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
    with mock.patch.multiple(torch.cuda, **answers), constants_on_the_host():
        yield


@contextmanager
def _in_place_of_cuda() -> Iterator[None]:
    from cotrain_compile.capture.offline import absent_card
    from cotrain_compile.capture.offline.card_attention import AttentionKernel

    def chosen(*_: object) -> AttentionKernel:
        return AttentionKernel(_chosen[0])

    with (
        mock.patch.object(absent_card, "kernel_of", chosen),
        absent_card.absent_card((9, 0), 80 << 30),
    ):
        yield
