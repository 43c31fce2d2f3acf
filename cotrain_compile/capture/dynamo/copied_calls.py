"""Copied calls: what a trace has made for some tensors, made again for others that look the same.

Private torch API used: `TensorVariable`, `FakeTensor`, `no_dispatch`. Reason: Dynamo follows code
for each tensor as if it had seen none. Tried on torch 2.13.0.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._mode_utils import no_dispatch

from cotrain_compile.capture.nodes.fake_calls import fake_of

TRIED = ("2.13.",)


def look_of(variable: Any) -> object:
    """What code may ask of a tensor of a trace without its numbers; None where it is not plain."""
    return look_of_value(_value(variable)) if type(variable) is TensorVariable else None


def look_of_value(value: object) -> object:
    """What code may ask of a tensor without its numbers; None of what is no plain one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if any(not isinstance(size, int) for size in value.shape):
        return None
    return (
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
    )


def _value(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]


@dataclass(frozen=True)
class TracedCall:
    """What was traced for some tensors, the `column`: the nodes `made` of them."""

    graph: fx.Graph
    column: Sequence[Any]
    made: Sequence[fx.Node]

    @cached_property
    def order(self) -> Sequence[int]:
        """The entries in the order in which they became inputs of the graph."""
        place = {node: i for i, node in enumerate(self.graph.find_nodes(op="placeholder"))}
        mine = [item.as_proxy().node for item in self.column]
        return sorted(range(len(mine)), key=lambda i: place.get(mine[i], -1))

    def inputs_like(self, column: Sequence[Any]) -> list[fx.Node] | None:
        """The nodes of other entries, made inputs in the order of these; None if they differ."""
        realized = {i: column[i].realize() for i in self.order}
        mine = [item.as_proxy().node for item in self.column]
        others = [realized[i] for i in range(len(mine))]
        if any(type(item) is not TensorVariable for item in others):
            return None
        nodes = [item.as_proxy().node for item in others]
        looks = ([look_of_value(n.meta["example_value"]) for n in some] for some in (mine, nodes))
        same = next(looks) == next(looks)
        return nodes if same and len(set(nodes)) == len(nodes) else None

    def may_be_copied(self) -> bool:
        """Whether what was made are calls, in memory of their own or all of that of an input."""
        if any(type(item) is not TensorVariable for item in self.column):
            return False
        values = [_value(item) for item in self.column]
        given, memory = {id(value) for value in values}, {_storage(value) for value in values}
        for node in self.made:
            value = node.meta.get("example_value")
            if node.op not in ("call_function", "call_method"):
                return False
            if node.target is operator.setitem or _is_of_settings(node):
                continue
            if type(value) is not FakeTensor:
                return False
            if _storage(value) in memory and id(value) not in given:
                return False
        return len(memory) == len(values)

    def copy_for(self, inputs: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Add the nodes that were made to the graph again, of other `inputs`; each by what it is
        a copy of.
        """
        of = [item.as_proxy().node for item in self.column]
        new = dict(zip(of, inputs, strict=True))
        values = {id(a.meta["example_value"]): b.meta["example_value"] for a, b in new.items()}
        for node in self.made:
            added = self.graph.create_node(
                node.op,
                node.target,
                map_arg(node.args, lambda n: new.get(n, n)),
                map_arg(node.kwargs, lambda n: new.get(n, n)),
                node.name.rstrip("0123456789").rstrip("_") or node.name,
                node.type,
            )
            added.meta = copy.copy(node.meta)
            value = node.meta.get("example_value")
            if isinstance(value, FakeTensor):
                if id(value) not in values:
                    values[id(value)] = _like(value)
                added.meta["example_value"] = values[id(value)]
            new[node] = added
        return new


def _is_of_settings(node: fx.Node) -> bool:
    """Whether `node` computes with numbers alone: the same for all, as `-lr`, and no `p.item()`."""
    numbers = [n.meta.get("example_value") for n in (node, *node.all_input_nodes)]
    return all(isinstance(value, torch.SymFloat | torch.SymInt) for value in numbers)


def nodes_behind(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    """What was added to `graph` since `last` was its last node."""
    new: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        new.append(node)
    return new[::-1]


def _storage(value: torch.Tensor) -> int:
    address: int = value.untyped_storage()._cdata
    return address


def _like(value: FakeTensor) -> torch.Tensor:
    """A fake tensor that looks the same, in memory of its own."""
    with no_dispatch():
        bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return fake_of(value.fake_mode, bare, value.fake_device)
