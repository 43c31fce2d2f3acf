"""Zeros without memory, by which autograd's forward mode leaves work out, become plain zeros.

    %zero = _efficientzerotensor([4])   ->   %zero = zeros([4])

In: the captured graph. Out: the same graph, in which every tensor has memory. Where it was traced,
an op on such a zero was already left out or had its result known; an op that is called without
torch's dispatch to that knowledge would read memory that is not there.

Private torch API used: `Tensor._is_zerotensor`. Reason: it tells such a tensor. Tried on torch
2.13.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor


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
