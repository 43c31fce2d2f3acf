"""Storages: what of a tensor's memory a copy between device and host takes.

In: a tensor, and the launch of its copy. Out: the tensor itself, a part of it as one row, or all of
the memory that it shows, so that any view of it fits the copy.
"""

from __future__ import annotations

import torch

from cotrain_compile.runtime.ops import Launch


def part_of(on_host: torch.Tensor, launch: Launch) -> torch.Tensor:
    """The part of it that a copy is about, as one row; all of it where none is named."""
    if not launch.part:
        return on_host
    begin, end = launch.part
    return on_host.view(-1)[begin:end]


def copied_of(source: torch.Tensor, launch: Launch) -> torch.Tensor:
    """What a copy of `source` takes: itself where it has its memory alone, or else all of that."""
    has_own = source.untyped_storage().nbytes() == source.nbytes
    is_whole = source.is_contiguous() and (has_own or bool(launch.part))
    return source if is_whole else whole_storage(source)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that `tensor` shows, as one row."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())
