"""Kernel values: what kernels return, where the fake tensors of the trace say otherwise.

In: the captured graph. Out: the same graph, its traced values as the kernels will make them. Seen
in torch 2.11.0, 2.13.0 and 2.15.0:

- Norms on the CPU with a bfloat16 or float16 input and float32 weights, as under autocast, return
  statistics in float32 and the input's gradient in the input's dtype. Fake tensors have the input's
  dtype for the former and, of a group norm, the weight's for the latter.
- `aten.copy` into a view makes all of the storage that is viewed again, also where a parameter is
  the view. A fake tensor out of the cache of its mode, which does not look at storages, has the
  part that is shown.
- The wait for a collective returns the memory that the collective has made. Its fake tensor is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from cotrain_compile.capture.nodes.storages import is_view, traced_again
from cotrain_compile.graph.collectives import is_wait

aten = torch.ops.aten

# Position of the weight among the arguments; results 1 and 2 are statistics.
_NORMS: Mapping[object, int] = {
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.no_stats: 1,
    aten._native_batch_norm_legit_functional.default: 1,
    aten._batch_norm_with_update_functional.default: 1,
}
_INPUT_OF_GROUP_NORM_BACKWARD = 1


def use_kernel_values(graph: fx.Graph) -> None:
    """Correct the values of such ops, and of what is made from them."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        traced = value = node.meta.get("val")
        if _is_op(node) and not corrected.isdisjoint(node.all_input_nodes):
            value = traced_again(node)
        value = _as_kernels_do(node, value)
        may_show = is_view(node) or node.target is aten.copy.default
        shows_corrected = may_show and value is not traced
        if shows_corrected or _copies_into_view(node) or _dtypes(value) != _dtypes(traced):
            node.meta["val"] = value
            corrected.add(node)


def _as_kernels_do(node: fx.Node, value: Any) -> Any:
    """`value`, what fake tensors say of `node`, as its kernel makes it."""
    if _copies_into_view(node) or is_wait(node):
        return traced_again(node)
    if node.target in _NORMS:
        weight = _argument(node, _NORMS[node.target])
        if _on_cpu(value[0]) and isinstance(weight, torch.Tensor):
            statistics = [_in_dtype(item, weight.dtype) for item in value[1:3]]
            return (value[0], *statistics, *value[3:])
    if node.target is aten.native_group_norm_backward.default and _on_cpu(value[0]):
        given = _argument(node, _INPUT_OF_GROUP_NORM_BACKWARD)
        return (_in_dtype(value[0], given.dtype), *value[1:])
    return value


def _is_op(node: fx.Node) -> bool:
    """Whether `node` can be made again: it is no operator of higher order, nor the output."""
    return isinstance(node.target, torch._ops.OpOverload) or is_view(node)


def _copies_into_view(node: fx.Node) -> bool:
    if node.target is not aten.copy.default:
        return False
    destination = node.all_input_nodes[0]
    return is_view(destination) or _is_part_of_storage(destination)


def _is_part_of_storage(node: fx.Node) -> bool:
    """Whether `node` is an input in a storage larger than its elements, as far as is known."""
    value = node.meta["val"] if node.op == "placeholder" else None
    if not isinstance(value, torch.Tensor):
        return False
    # Not `nbytes`: of a tensor with symbolic sizes torch does not tell it.
    sizes = value.untyped_storage().nbytes(), value.numel() * value.element_size()
    return all(isinstance(nbytes, int) for nbytes in sizes) and sizes[0] > sizes[1]


def _argument(node: fx.Node, position: int) -> Any:
    argument = node.args[position]
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _in_dtype(value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if value is None or value.dtype == dtype:
        return value
    return torch.empty_like(value, dtype=dtype)


def _on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _dtypes(value: Any) -> list[torch.dtype | None]:
    return [getattr(leaf, "dtype", None) for leaf in tree_leaves(value)]
