"""Storages of the captured graph: which values are views of one another."""

from __future__ import annotations

import torch
from torch import fx


def storage_key(node: object) -> object:
    """Equal for two values that share memory; the node itself for what is not one tensor.

    The fake tensors of the trace share storages as the real ones will.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, torch.Tensor):
        return value.untyped_storage()._cdata
    return node
