"""Storages of the captured graph: which values are views of one another."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils._pytree import tree_map

from cotrain_compile.graph import returns_argument_memory


def storage_key(node: object) -> object:
    """Equal for two values that share memory; the node itself for what is not one tensor.

    The fake tensors of the trace share storages as the real ones will.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, torch.Tensor):
        return value.untyped_storage()._cdata
    return node


def view_again(node: fx.Node) -> None:
    """Give `node`, if it is a view, and views of it the storage of what they view now."""
    is_view = returns_argument_memory(node) and not node.target._schema.is_mutable  # type: ignore[union-attr]
    if node.target is operator.getitem or is_view:
        args, kwargs = tree_map(
            lambda arg: arg.meta["val"] if isinstance(arg, fx.Node) else arg,
            (node.args, node.kwargs),
        )
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        for user in node.users:
            view_again(user)
