"""Kept values: the fake tensors of an ATen graph as plain numbers, and made again from these.

torch's pickler of graphs describes a tensor as the trace has seen it, with what it was a view of,
and makes it again by the ops of a trace, for most of the time that a kept graph takes to read. What
later stages ask of a value is less: which memory it shows, and how.

Private torch API used: `FakeTensor`, `torch.utils._mode_utils.no_dispatch`. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Shown:
    """A tensor without data: the number of its storage, how large that is, and what it shows."""

    storage: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


Values = dict[str, Any]


def values_of(graph: fx.Graph) -> Values | None:
    """By node, its value with tensors as `Shown`; None where one says more than that has."""
    storages: dict[int, int] = {}
    found = {node.name: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    if not all(map(_is_plain, tree_leaves(list(found.values())))):
        return None

    def shown(value: torch.Tensor) -> Shown:
        storage = value.untyped_storage()
        return Shown(
            storages.setdefault(storage._cdata, len(storages)),
            storage.nbytes(),
            int(value.storage_offset()),
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
        )

    return {name: tree_map_only(torch.Tensor, shown, value) for name, value in found.items()}


def _is_plain(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, _PLAIN)
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return (
        isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
        and all(type(number) is int for number in numbers)
    )


def give_values(nodes: Iterable[fx.Node], values: Values, fake_mode: Any) -> None:
    """Give `nodes` the `values` that were kept of them, as fake tensors of `fake_mode`."""
    storages: dict[int, torch.UntypedStorage] = {}

    def made(value: Any) -> Any:
        if not isinstance(value, Shown):
            return value
        if value.storage not in storages:
            storages[value.storage] = torch.UntypedStorage(value.storage_bytes, device="meta")
        bare = torch.empty(0, dtype=value.dtype, device="meta")
        bare.set_(storages[value.storage], value.offset, value.shape, value.strides)
        return FakeTensor(fake_mode, bare, value.device).requires_grad_(value.requires_grad)

    with no_dispatch():
        for node in nodes:
            if node.name in values:
                node.meta["val"] = tree_map(made, values[node.name])
