"""Untouched zeros: states on memory that nobody has written, which need not be copied to move.

Most states of optimizers begin as zeros. They are made before a plan says where they live, so on
memory of the host that the system hands out as zeros when it is first read: to make them takes no
memory and no time, and at their home they are made as zeros again.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cotrain_compile.errors import HostMemoryError
from cotrain_compile.support.units import format_bytes

MAKE_ZEROS = frozenset(
    {
        torch.ops.aten.zeros.default,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.new_zeros.default,
    }
)
# Below, a mapping of its own costs more than to write the zeros.
_LEAST_BYTES = 2**20

# Tensors made here, with their version: whoever writes one changes that.
_made = WeakTensorKeyDictionary()


def zeros_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What `func`, one of `MAKE_ZEROS`, makes, on the host.

    Raises `HostMemoryError` where the system has no such memory to give.
    """
    like: torch.Tensor = func(*args, **{**kwargs, "device": torch.device("meta")})
    is_plain = type(like) is torch.Tensor and like.layout is torch.strided
    nbytes = like.untyped_storage().nbytes() if is_plain else 0
    if nbytes < _LEAST_BYTES:
        small: torch.Tensor = func(*args, **{**kwargs, "device": torch.device("cpu")})
        return small
    memory = _map(nbytes, like)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=like.dtype).set_(storage, 0, like.size(), like.stride())
    _made[made] = made._version
    return made


def _map(nbytes: int, like: torch.Tensor) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"a state of the optimizer, {str(like.dtype).removeprefix('torch.')} of "
            f"{tuple(like.shape)}, takes {format_bytes(nbytes)} of host memory, and the system "
            f"does not give them: {error.strerror}. Free host memory, raise the limit of the "
            "container, or take a smaller model or an optimizer with smaller states. Nothing was "
            "updated, and no state was made."
        ) from error


def is_untouched_zero(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was made here and every byte of its storage is still zero; asked once.

    What no version tells, as a write by way of `.data`, the bytes do.
    """
    version = _made.pop(tensor, None)
    if version is None or version != tensor._version:
        return False
    row = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return row.is_cpu and not bool(row.any())
