"""Kept gradients: which values that a step returns are stored in the `.grad` of which parameter.

In: Dynamo's graph with the stores that its trace has seen, then the step graph made of it. Out: for
`StepGraph.kept`, the returned nodes with the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cotrain_compile.graph import StepGraph, StepInput, returned_values


def kept_outputs(
    module: fx.GraphModule, stores: Sequence[tuple[torch.Tensor, fx.Node]]
) -> tuple[int, Mapping[int, torch.Tensor]]:
    """How many values Dynamo's graph returns, and whose gradient each of them is, by position."""
    (output,) = module.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    param_of = {node: param for param, node in stores}
    found = {i: param_of[node] for i, node in enumerate(returned) if node in param_of}
    return len(returned), found


def kept_in(
    step: StepGraph,
    kept: tuple[int, Mapping[int, torch.Tensor]],
    inputs: Sequence[StepInput],
    values: Sequence[Any],
) -> Mapping[str, str]:
    """The names of the returned nodes that are `kept` gradients, with their parameters'.

    None where the ATen graph returns something else than Dynamo's, value by value.
    """
    count, params = kept
    returned = returned_values(step)
    names = {id(value): item.name for value, item in zip(values, inputs, strict=True)}
    if len(returned) != count:
        return {}
    return {
        returned[position].name: names[id(param)]
        for position, param in params.items()
        if isinstance(returned[position], fx.Node) and id(param) in names
    }
