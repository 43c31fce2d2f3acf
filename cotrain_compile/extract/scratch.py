"""Scratch: memory that kernels of a card take while they run, which no tensor of the graph shows.

In: a node. Out: bytes. The backwards of flash and memory-efficient attention add up the gradient
of the query in float32, whatever they compute in: `dq_accum` and `grad_q` of torch's
`aten/src/ATen/native/transformers/cuda`. Their kernels for the CPU have other names and none. Those
of FlashAttention's own package do the same (`dq_accum` of `csrc/flash_attn/flash_api.cpp`), and
where heads share a key, they make a gradient of key and value for each (`dk_expanded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from cotrain_compile.extract.op_costs import op_name
from cotrain_compile.graph.op_calls import arguments_of, target_of

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
# Of FlashAttention's package, in whatever namespace.
_OF_PACKAGE = frozenset(("_flash_attn_backward", "_flash_attn_varlen_backward"))
_FLOAT32_BYTES = 4
_QUERY = 1  # behind the gradient of the result


def scratch_bytes(node: fx.Node) -> Any:
    """Bytes, a symbol where sizes are dynamic; None for a kernel that is not known to take any."""
    if op_name(target_of(node)).partition("::")[2] in _OF_PACKAGE:
        return _of_package(arguments_of(node))
    if node.target not in _SUMS_IN_FLOAT32:
        return None
    query: Any = node.args[_QUERY]
    value = query.meta["val"]
    # In float32 the sum is the gradient itself.
    return value.numel() * _FLOAT32_BYTES if value.dtype != torch.float32 else None


def _of_package(args: Mapping[str, Any]) -> Any:
    query, key = (args[name].meta["val"] for name in ("q", "k"))
    shared = query.shape[-2] // key.shape[-2]
    expanded = 2 * key.numel() * shared * key.element_size() if shared > 1 else 0
    return query.numel() * _FLOAT32_BYTES + expanded
