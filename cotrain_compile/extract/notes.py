"""Notes on a step: what of it costs more than it has to, in words. StepGraph in, sentences out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cotrain_compile.graph import StepGraph
from cotrain_compile.support.units import format_bytes

# What the fused kernels of `scaled_dot_product_attention` call a mask that is added to the scores.
_MASKS = ("attn_mask", "attn_bias")


def masked_attention(step: StepGraph) -> tuple[str, ...]:
    """That attention reads a mask, which costs memory and rules out flash attention on a card."""
    masks = [mask for node in step.nodes for mask in _masks_read(node)]
    if not masks:
        return ()
    nbytes = max(_hint(value.numel()) * value.element_size() for value in map(_value, masks))
    return (
        f"{len(masks)} attentions read a mask (the largest has {format_bytes(nbytes)} over all its "
        "dimensions), with which a card runs no flash attention; where the mask is only causal, "
        "pass is_causal=True in its place, and to a Hugging Face model neither attention_mask nor "
        "position_ids",
    )


def _masks_read(node: fx.Node) -> Iterator[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or "scaled_dot_product" not in schema.name or "backward" in schema.name:
        return
    names = [argument.name for argument in schema.arguments]
    passed: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    for name in _MASKS:
        if isinstance(mask := passed.get(name), fx.Node) and _value(mask).dim() > 2:
            yield mask


def _value(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _hint(size: Any) -> int:
    """A size for the traced shapes, without fixing a dynamic one."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
