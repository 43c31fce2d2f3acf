"""Storages of the captured graph: which values are views of one another.

Traced again: what fake tensors say of a node with the values that its inputs have now.

Private torch API used: `FakeTensor`, `disable_fake_tensor_cache`. Tried on torch 2.11.0, 2.13.0 and
2.15.0.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.utils._pytree import tree_leaves, tree_map

from cotrain_compile.graph import returns_argument_memory
from cotrain_compile.graph.collectives import is_wait


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


def traced_again(node: fx.Node) -> Any:
    """The value of `node`, a call, made from those of its inputs; what memory it shows is theirs.

    The mode's cache of results is left alone: it does not look at storages.
    """
    args, kwargs = tree_map(
        lambda arg: arg.meta["val"] if isinstance(arg, fx.Node) else arg, (node.args, node.kwargs)
    )
    # What its fake kernel makes is new; the real one returns its argument.
    target: Any = torch.ops.aten.alias.default if is_wait(node) else node.target
    known = tree_leaves((args, kwargs, node.meta.get("val")))
    fake = next((leaf for leaf in known if isinstance(leaf, FakeTensor)), None)
    if fake is None:
        return target(*args, **kwargs)
    with fake.fake_mode, disable_fake_tensor_cache(fake.fake_mode):
        return target(*args, **kwargs)
