"""Op calls: which op a node calls and with which arguments, also where it does so through another.

In a graph without writes, a custom op that writes into its arguments is called by torch's
`auto_functionalized`, on copies of what it would write into. To what counts flops, bytes and random
numbers it is the op itself: the backwards of FlashAttention's own package are such ops.

Private torch API used: `torch._higher_order_ops.auto_functionalize.auto_functionalized` and its
second form, which takes what is written as `_all_bases` with an index for each argument. Reason:
nothing public names them. Tried on torch 2.13.0.

The op that stands for a piece of what a step fetches in pieces.

`piece(source, begin, end)` are so many elements of `source` as one row, in memory of their own. The
pass that puts it in lets others replace it by the copy that a task has made: it never runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

_BASES = "_all_bases"


def target_of(node: fx.Node) -> Any:
    """What a call calls."""
    return node.args[0] if _is_functionalized(node) else node.target


def arguments_of(node: fx.Node) -> Mapping[str, Any]:
    """What it is called with, by the names of the schema; what has no name there, by its place.

    Of an argument that is written into, and is a view, the tensor that it is a view of.
    """
    schema = getattr(target_of(node), "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if _is_functionalized(node):
        return _given(node.kwargs, names)
    names += [str(index) for index in range(len(names), len(node.args))]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_functionalized(node: fx.Node) -> bool:
    return node.target in (auto_functionalized, auto_functionalized_v2)


def _given(kwargs: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    bases: Any = kwargs.get(_BASES, ())
    found = {}
    for name in names:
        index = kwargs.get(f"_{name}_base_index")
        if name in kwargs:
            found[name] = kwargs[name]
        elif isinstance(index, int):
            found[name] = bases[index]
    return found


_library = torch.library.Library("cotrain", "FRAGMENT")
_library.define("piece(Tensor source, int begin, int end) -> Tensor")


def _piece(source: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return source.new_empty(end - begin)


_library.impl("piece", _piece, "CompositeExplicitAutograd")

PIECE = torch.ops.cotrain.piece.default
