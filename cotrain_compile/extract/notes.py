"""Notes on a step: by what readers know it, and what of it costs more than it has to.

In: a StepGraph. Out: the names of its model and batch; sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cotrain_compile.dataflow import Job, Role
from cotrain_compile.extract.op_flops import hint
from cotrain_compile.graph import StepGraph
from cotrain_compile.support.units import format_bytes

# What the fused kernels of `scaled_dot_product_attention` call a mask that is added to the scores.
_MASKS = ("attn_mask", "attn_bias")


def masked_attention(step: StepGraph) -> tuple[str, ...]:
    """That attention reads a mask, which costs memory and rules out flash attention on a card."""
    masks = [mask for node in step.nodes for mask in _masks_read(node)]
    if not masks:
        return ()
    nbytes = max(hint(value.numel()) * value.element_size() for value in map(_value, masks))
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


# Wrap a model without being one.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")


def job_of(step: StepGraph) -> Job:
    """The class of the outermost module that most ops are in, and the shapes of the batch."""
    models = Counter(_outermost(step))
    batch = {
        item.name: tuple(map(hint, value.shape))
        for node in step.nodes
        if node.op == "placeholder"
        and (item := step.input_of_node[node.name]).role is Role.BATCH
        and isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    return Job(next((name for name, _ in models.most_common(1)), ""), batch)


def _outermost(step: StepGraph) -> Iterator[str]:
    """By op, the class of the model that called it."""
    for node in step.nodes:
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
            if name not in _WRAPPERS:
                yield name
                break
