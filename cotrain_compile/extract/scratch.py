"""Scratch: memory that kernels of a card take while they run, which no tensor of the graph shows.

In: a node. Out: bytes. The backwards of flash and memory-efficient attention add up the gradient
of the query in float32, whatever they compute in: `dq_accum` and `grad_q` of torch's
`aten/src/ATen/native/transformers/cuda`. Their kernels for the CPU have other names and none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_SUMS_IN_FLOAT32 = {
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_flash_attention_backward",
        "_efficient_attention_backward",
    )
    if hasattr(_aten, name)
}
_FLOAT32_BYTES = 4
_QUERY = 1  # behind the gradient of the result


def scratch_bytes(node: fx.Node) -> Any:
    """Bytes, a symbol where sizes are dynamic; None for a kernel that is not known to take any."""
    if node.target not in _SUMS_IN_FLOAT32:
        return None
    query: Any = node.args[_QUERY]
    value = query.meta["val"]
    # In float32 the sum is the gradient itself.
    return value.numel() * _FLOAT32_BYTES if value.dtype != torch.float32 else None
