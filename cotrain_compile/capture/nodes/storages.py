"""Storages of the captured graph: which values are views of one another."""

from __future__ import annotations

import operator

import torch
from torch import fx

from cotrain_compile.capture.nodes.refake import traced_again
from cotrain_compile.graph import returns_argument_memory


def storage_key(node: object) -> object:
    """Equal for two values that share memory; the node itself for what is not one tensor.

    The fake tensors of the trace share storages as the real ones will.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, torch.Tensor):
        return value.untyped_storage()._cdata
    return node


def read_instead(user: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Let `user` read `new` in place of `old`; a view then shows the storage of `new`."""
    user.replace_input_with(old, new)
    _view_again(user)


def _view_again(node: fx.Node) -> None:
    """Give `node`, if it is a view, and views of it the storage of what they view now."""
    if is_view(node):
        node.meta["val"] = traced_again(node)
        for user in node.users:
            _view_again(user)


def is_view(node: fx.Node) -> bool:
    """Whether `node` shows memory of its argument, or is an item of a tuple."""
    if node.target is operator.getitem:
        return True
    return returns_argument_memory(node) and not node.target._schema.is_mutable  # type: ignore[union-attr]
