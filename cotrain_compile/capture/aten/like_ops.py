"""Like ops: random numbers like a tensor need its shape alone, so they do not wait for its value.

    %noise = randn_like(%new_weight)   ->   %noise = randn([8, 4])

In: the captured graph. Out: the same graph, whose random ops, and the constants they begin from,
read no tensor for its shape. Noise on a parameter, drawn behind its update, would tie that update
to the place of the draw otherwise. A tensor that is not contiguous is left: its elements may be
filled in another order.

Zeros without memory, by which autograd's forward mode leaves work out, become plain zeros.

    %zero = _efficientzerotensor([4])   ->   %zero = zeros([4])

In: the captured graph. Out: the same graph, in which every tensor has memory. Where it was traced,
an op on such a zero was already left out or had its result known; an op that is called without
torch's dispatch to that knowledge would read memory that is not there.

Private torch API used: `Tensor._is_zerotensor`. Reason: it tells such a tensor. Tried on torch
2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from cotrain_compile.graph.random_ops import is_random

aten = torch.ops.aten

# By op: the one that takes a size, and how many arguments between the tensor and the options go
# along, in front of the size or behind it.
_SIZED: Mapping[Any, tuple[Callable[..., Any], int, bool]] = {
    aten.randn_like.default: (aten.randn.default, 0, True),
    aten.rand_like.default: (aten.rand.default, 0, True),
    aten.randint_like.default: (aten.randint.default, 1, True),
    aten.randint_like.low_dtype: (aten.randint.low, 2, True),
    aten.empty_like.default: (aten.empty.memory_format, 0, True),
    aten.full_like.default: (aten.full.default, 1, False),
}


def take_shapes_alone(graph: fx.Graph) -> None:
    """Replace ops that take the shape of a tensor for random numbers by ops that take a size."""
    for node in list(graph.nodes):
        if node.target in _SIZED and _is_for_draws(node) and _has_plain_layout(node):
            _replace(node)


def _is_for_draws(node: fx.Node) -> bool:
    return is_random(node) or any(is_random(user) for user in node.users)


def _has_plain_layout(node: fx.Node) -> bool:
    value = node.meta["val"]
    return all(isinstance(size, int) for size in value.shape) and value.is_contiguous()


def _replace(node: fx.Node) -> None:
    op, count, is_before = _SIZED[node.target]
    value, taken = node.meta["val"], node.args[1 : 1 + count]
    size: Any = list(value.shape)
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with node.graph.inserting_before(node):
        sized = node.graph.call_function(
            op, (*taken, size) if is_before else (size, *taken), options
        )
    sized.meta = dict(node.meta)
    node.replace_all_uses_with(sized)
    node.graph.erase_node(node)


def give_zeros_memory(graph: fx.Graph) -> None:
    """Replace each op whose result is a zero without memory by one that fills memory with zeros."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, FakeTensor) and value._is_zerotensor():
            options: dict[str, Any] = {
                "dtype": value.dtype,
                "device": value.device,
                "pin_memory": False,
            }
            with graph.inserting_before(node), value.fake_mode:
                zeros = graph.call_function(
                    torch.ops.aten.zeros.default, (list(value.shape),), options
                )
                zeros.meta = {**node.meta, "val": torch.zeros_like(value)}
            node.replace_all_uses_with(zeros)
            graph.erase_node(node)
