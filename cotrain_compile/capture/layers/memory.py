"""Memory: values of copied nodes, which show memory of their own, and which inputs are written.

Private torch API used: `FakeTensor`, `no_dispatch`, `TracingContext.fw_metadata`. Reason: values
are copied without running ops, and AOTAutograd has to know which inputs are written. Tried on
torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from cotrain_compile.capture.nodes.fake_calls import fake_of


def shown_in(memory: torch.UntypedStorage, value: torch.Tensor) -> torch.Tensor:
    """As `value`, in other memory."""
    assert isinstance(value, FakeTensor)
    with no_dispatch():
        bare = torch.empty(0, dtype=value.dtype, device="meta")
        bare.set_(memory, value.storage_offset(), value.shape, value.stride())
        bare.requires_grad_(value.requires_grad)
        return fake_of(value.fake_mode, bare, value.fake_device)


def of_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value`, a tensor or a tree with some, with what `function` makes of each of them."""
    if isinstance(value, torch.Tensor):  # mostly
        return function(value)
    return tree_map_only(torch.Tensor, function, value)


def same_storage(
    storage: torch.UntypedStorage, owner: fx.Node, other: fx.Node
) -> torch.UntypedStorage:
    """What `storage`, made by `owner`, is of `other`, which makes the like."""
    pairs = zip(all_storages(owner), all_storages(other), strict=True)
    return next(theirs for mine, theirs in pairs if mine._cdata == storage._cdata)


def is_plain(value: torch.Tensor) -> bool:
    """Whether `value` is of a trace, and has strides."""
    return isinstance(value, FakeTensor) and value.layout is torch.strided


def all_storages(node: fx.Node) -> list[torch.UntypedStorage]:
    """The memory that each value of `node` shows."""
    leaves: Sequence[Any] = tree_leaves(node.meta.get("val"))
    return [
        leaf.untyped_storage()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def storages(node: fx.Node) -> list[int]:
    """The same as numbers."""
    return [storage._cdata for storage in all_storages(node)]


def tell_of_writes(graph: fx.Graph, like: Mapping[fx.Node, fx.Node]) -> None:
    """Let AOTAutograd know that inputs are written as those are that they are `like`."""
    metadata = TracingContext.get().fw_metadata
    if metadata is None:
        return
    place = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    for node, model in like.items():
        metadata.input_info[place[node]] = metadata.input_info[place[model]]
    metadata.__post_init__()
