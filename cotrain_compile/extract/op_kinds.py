"""Op kinds: what kind of work a node of the graph is: see `machine.op_classes`.

In: a node with its fake values and its flops. Out: an `OpKind`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from cotrain_compile.extract.op_costs import op_name
from cotrain_compile.graph.op_calls import arguments_of, target_of
from cotrain_compile.machine.op_classes import OpKind

# Each filter of a depthwise convolution has a channel or few; the matrix units want 16 and more.
_FEW_CHANNELS = 8

# Torch does not tag these as pointwise.
_POINTWISE = frozenset(
    f"aten::{name}"
    for name in (
        *("_to_copy", "copy_", "copy", "native_dropout", "native_dropout_backward", "fill_"),
        *("constant_pad_nd", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like"),
        *("bernoulli", "rand_like", "zero_", "slice_backward", "select_backward", "arange"),
        *("fill", "cat", "stack"),
    )
)
_NORM_WORDS = ("norm", "softmax")
_TABLE_WORDS = ("embedding", "index", "gather", "scatter", "take", "sort", "topk", "nll_loss")


def kind_of_op(node: fx.Node, flops: Any) -> OpKind:
    """The kind of a call that writes something."""
    target = target_of(node)
    name = op_name(target)
    plain = name.partition("::")[2]
    if isinstance(flops, torch.SymInt) or flops > 0:
        return _computing(node, plain)
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags or name in _POINTWISE:
        return OpKind.POINTWISE
    if any(word in plain for word in _TABLE_WORDS):
        return OpKind.TABLE
    if any(word in plain for word in _NORM_WORDS):
        return OpKind.NORM
    return OpKind.REDUCTION if torch.Tag.reduction in tags else OpKind.OTHER


def _computing(node: fx.Node, plain: str) -> OpKind:
    if "attention" in plain or "flash_attn" in plain:
        return OpKind.ATTENTION_BACKWARD if "backward" in plain else OpKind.ATTENTION
    if "conv" in plain:
        return _convolution(node)
    return OpKind.BATCHED_PRODUCT if "bmm" in plain else OpKind.PRODUCT


def _convolution(node: fx.Node) -> OpKind:
    """By its filters, (out, in of a group, ...), and by how its input lies."""
    arguments = arguments_of(node)
    values = [v for a in arguments.values() for v in _tensors(a)]
    wide = [v for v in values if v.dim() >= 3]
    weight, groups = arguments.get("weight"), arguments.get("groups")
    filters = next(_tensors(weight), None) if weight is not None else None
    if filters is not None and groups not in (None, 1) and filters.shape[1] <= _FEW_CHANNELS:
        return OpKind.DEPTHWISE
    if any(v.dim() == 4 and _lies_last(v) for v in wide):
        return OpKind.CHANNELS_LAST
    return OpKind.CONVOLUTION


def _lies_last(value: torch.Tensor) -> bool:
    """Whether its channels are next to each other, and it has some and some places."""
    channels, places = value.stride()[1], value.stride()[-1]
    return value.shape[1] > 1 and value.shape[-1] > 1 and channels == 1 and places != 1


def _tensors(argument: Any) -> Any:
    for leaf in tree_leaves(argument):
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, torch.Tensor):
            yield value
