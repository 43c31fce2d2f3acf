"""Two ATen graphs, node by node: what a later stage could tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

# What later stages read of a node beside its value.
_READ = frozenset(
    {
        "ac_graph_id",
        "autograd_backward",
        "custom",
        "desc",
        "nn_module_stack",
        "recompute",
        "stack_trace",
    }
)


def described(module: fx.GraphModule) -> list[Any]:
    """By node: its op, arguments, notes and value; storages by where they were first seen."""
    storages: dict[int, int] = {}
    return [_node(node, storages) for node in module.graph.nodes]


def _node(node: fx.Node, storages: dict[int, int]) -> Any:
    args, kwargs = map_aggregate((node.args, node.kwargs), _name)
    notes = {key: value for key, value in node.meta.items() if key in _READ}
    values = tree_map(lambda value: tuple(_value(value, storages)), node.meta.get("val"))
    # torch may make a second object for an op; its dispatcher knows one by each name.
    target = node.target.name() if isinstance(node.target, OpOverload) else node.target
    return node.name, node.op, target, args, kwargs, repr(notes), values


def _name(argument: Any) -> Any:
    return f"%{argument.name}" if isinstance(argument, fx.Node) else argument


def _value(value: Any, storages: dict[int, int]) -> Iterator[Any]:
    yield type(value)
    if not isinstance(value, torch.Tensor):
        yield value
        return
    storage = value.untyped_storage()
    yield storages.setdefault(storage._cdata, len(storages))
    yield storage.nbytes()
    yield value.shape, value.stride(), value.storage_offset()
    yield value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()
