"""Local parts: what this rank holds of the tensors of a step that are made of others.

AOTAutograd gives a DTensor two placeholders, its local tensor and its device mesh, and returns one
as its local tensor. A quantized state or frozen weight, as of torchao, gets one for each it is
made of: codes, scales and a table. Each of these has a home of its own. In:
the ATen graph, with the inputs and values of Dynamo's. Out: an input and a value for each
placeholder of the ATen graph, and the tensors they are parts of.

Private torch API used: the descriptors in `node.meta["desc"]` (`torch._functorch._aot_autograd`),
read by their attributes `base`, `attr` and `idx`. Reason: nothing else says which input a
placeholder is a part of. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepInput

_LOCAL = "_local_tensor"


@dataclass(frozen=True)
class LocalParts:
    """The inputs of a step, one for each placeholder of its ATen graph.

    `values` are what they stand for on this rank, `whole` the user's tensors they belong to.
    """

    inputs: tuple[StepInput, ...]
    values: Sequence[Any]
    whole: Sequence[Any]

    def local_ids(self, whole: Collection[int]) -> set[int]:
        """The ids of what this rank holds of the tensors whose ids are `whole`."""
        both = zip(self.whole, self.values, strict=True)
        return {id(value) for owner, value in both if id(owner) in whole}


def local_parts(
    module: fx.GraphModule, inputs: Sequence[StepInput], values: Sequence[Any]
) -> LocalParts:
    """What the placeholders of the ATen graph `module` stand for.

    `inputs` and `values` are those of Dynamo's graph. Raises `CaptureError` for a tensor made of
    others that is neither a DTensor, nor a state of an optimizer, nor frozen.
    """
    if not any(map(is_traceable_wrapper_subclass, values)):
        return LocalParts(tuple(inputs), values, values)
    _refuse_other_subclasses(inputs, values)
    parts = [_part(node, inputs, values) for node in module.graph.find_nodes(op="placeholder")]
    flat, local, whole = zip(*parts, strict=True)
    return LocalParts(flat, local, whole)


def returned_positions(graph: fx.Graph, count: int) -> list[int]:
    """For each value that an ATen graph returns, its position among the `count` of Dynamo's graph.

    -1 for a device mesh, and for all where the two cannot be told to be the same.
    """
    (output,) = graph.find_nodes(op="output")
    returned: Any = output.args[0]
    if len(returned) == count:
        return list(range(count))
    described: Sequence[Any] = output.meta.get("desc") or ()
    if len(described) != len(returned):
        return [-1] * len(returned)
    return [_returned_position(description) for description in described]


def _returned_position(description: Any) -> int:
    if getattr(description, "attr", _LOCAL) != _LOCAL:
        return -1
    position = getattr(getattr(description, "base", description), "idx", -1)
    return int(position)


def _part(
    node: fx.Node, inputs: Sequence[StepInput], values: Sequence[Any]
) -> tuple[StepInput, Any, Any]:
    index, attributes = _origin(node.meta["desc"])
    item, whole = inputs[index], values[index]
    part = whole
    for attribute in attributes:
        part = getattr(part, attribute)
    if attributes and not isinstance(part, torch.Tensor):
        mesh = StepInput(item.node, f"{item.name}.{attributes[-1]}", Role.MESH)
        return mesh, part, part
    inner = "".join(f".{attribute}" for attribute in attributes if attribute != _LOCAL)
    return replace(item, name=item.name + inner, key=item.key + inner), part, whole


def _origin(description: Any) -> tuple[int, list[str]]:
    """The input of Dynamo's graph that a placeholder is a part of, and by which attributes."""
    attributes: list[str] = []
    while hasattr(description, "attr"):
        attributes.insert(0, description.attr)
        description = description.base
    if not hasattr(description, "idx"):
        raise CaptureError(
            "some inputs of the step are overlapping views of one tensor, beside DTensors; pass "
            "the tensor they are views of"
        )
    return description.idx, attributes


def _refuse_other_subclasses(inputs: Sequence[StepInput], values: Sequence[Any]) -> None:
    for item, value in zip(inputs, values, strict=True):
        if not is_traceable_wrapper_subclass(value) or hasattr(value, "device_mesh"):
            continue
        trains = isinstance(value, torch.Tensor) and value.requires_grad
        is_frozen = item.role in (Role.PARAM, Role.BUFFER) and not trains
        if item.role is not Role.OPTIMIZER_STATE and not is_frozen:
            raise CaptureError(
                f"{item.name} is a {type(value).__name__}, a tensor made of others, and the plan "
                "would not see these; train plain tensors or DTensors, and freeze this one "
                "(requires_grad_(False)) if adapters are trained beside it"
            )
