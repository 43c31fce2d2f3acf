"""A card that is host memory and threads, under a torch that is built with CUDA.

`load()` comes before the first import of torch in the process. After that `torch.cuda` is real, and
so are its streams, events, allocators and copies: what is not is the runtime below them
(`cudart.cpp`), on which the kernels of the CPU run (`kernels.cpp`). Ops come late, as on a card: a
stream that does not wait for what it needs computes wrong numbers.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fake_cuda.library import compiler, torch_folder
from tests.stub_card import library

_loaded: list[ctypes.CDLL] = []


def why_not() -> str | None:
    """Why there is no such card in this environment; None where there can be one."""
    if not (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "torch is built without CUDA; `make stub-card` makes an environment, and runs this"
    if compiler() is None or shutil.which("nm") is None:
        return "needs a C++ compiler and nm"
    return None


def load() -> None:
    """Make `torch.cuda`, when torch is imported, one with this card."""
    assert "torch" not in sys.modules, "the stub card is loaded before torch"
    for path in (library.driver(), library.runtime()):
        _loaded.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
    import torch

    torch.ops.load_library(library.kernels())
    _runtime().stub_card_faults.restype = ctypes.c_char_p


def is_loaded() -> bool:
    """Whether this process has the card."""
    return bool(_loaded)


def _runtime() -> ctypes.CDLL:
    return _loaded[1]


def faults() -> list[str]:
    """What was done wrong since this was last asked; all that the card was given is done."""
    import torch

    torch.cuda.synchronize()
    return list(dict.fromkeys(_runtime().stub_card_faults().decode().splitlines()))


def pins_left(count: int) -> None:
    """So many calls that pin memory go well from now on; below 0 all do."""
    _runtime().stub_card_pins_left(ctypes.c_int64(count))


@contextmanager
def delays(*, copies_us: int = 0, ops_us: int = 0, every: int = 3, seed: int = 0) -> Iterator[None]:
    """Within it, one of `every` copies and ops, by chance, comes up to so much late."""

    def late(copies_us: int, ops_us: int) -> None:
        most = ctypes.c_int64(copies_us), ctypes.c_int64(ops_us)
        _runtime().stub_card_delays(*most, ctypes.c_uint32(every), ctypes.c_uint32(seed))

    late(copies_us, ops_us)
    try:
        yield
    finally:
        late(0, 0)


@contextmanager
def free(free_bytes: int) -> Iterator[None]:
    """Within it, other processes have left so much of the card's memory to this one."""
    import torch

    now_bytes, _ = torch.cuda.mem_get_info()
    _runtime().stub_card_others(ctypes.c_size_t(now_bytes - free_bytes))
    try:
        yield
    finally:
        _runtime().stub_card_others(ctypes.c_size_t(0))
