"""Works: what calls that look alike cost, found once.

A step of many layers calls an op again and again on tensors of the same sizes. What that costs
follows from the op, its other arguments, and what the tensors that it reads and makes look like.
Calls whose sizes are symbols, or that call something else than an op, are looked at one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from cotrain_compile.extract.op_costs import (
    OpCost,
    computing_dtype,
    cost_of,
    kind_of_op,
    scratch_bytes,
)
from cotrain_compile.machine.op_classes import OpKind


@dataclass(frozen=True)
class FoundWork:
    """What a call costs, in which dtype, of which kind; and the bytes that its kernel takes."""

    cost: OpCost
    scratch: Any
    dtype: str
    kind: OpKind


class Works:
    """The work of the calls of one step."""

    def __init__(self) -> None:
        self._known: dict[object, FoundWork] = {}
        self._looks: dict[fx.Node, object] = {}

    def of(self, node: fx.Node, *, is_free: bool) -> FoundWork:
        """The work of `node`; `is_free` says that it computes nothing, as a view."""
        key = self._key(node, is_free)
        if key is None:
            return _work(node, is_free)
        if key not in self._known:
            self._known[key] = _work(node, is_free)
        return self._known[key]

    def _key(self, node: fx.Node, is_free: bool) -> object:
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        sources = [node, *node.all_input_nodes]
        looks = [self._look_of(source) for source in sources]
        if None in looks:
            return None

        def read(argument: Any) -> object:
            if isinstance(argument, fx.Node):
                return sources.index(argument)  # what is read twice has its bytes once
            return type(argument), argument

        arguments: Any = map_aggregate((node.args, node.kwargs), read)  # type: ignore[arg-type]
        return node.target, arguments, tuple(looks), is_free

    def _look_of(self, node: fx.Node) -> object:
        if node not in self._looks:
            self._looks[node] = _look(node.meta.get("val"))
        return self._looks[node]


def _look(value: object) -> object:
    """What of a value decides a cost; None where more than that may."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return None
        sizes = (*value.shape, *value.stride())
        known = all(type(size) is int for size in sizes)
        return (value.dtype, value.device, sizes) if known else None
    if isinstance(value, list | tuple):
        items = tuple(map(_look, value))
        return None if None in items else items
    return () if value is None else None


def _work(node: fx.Node, is_free: bool) -> FoundWork:
    cost = OpCost(0, 0) if is_free else cost_of(node)
    kind = kind_of_op(node, cost.flops) if cost.bytes_moved else OpKind.UNSAID
    return FoundWork(cost, scratch_bytes(node), computing_dtype(node, cost.flops), kind)
