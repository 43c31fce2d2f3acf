"""Kept gradients: which values that a step returns are stored in the `.grad` of which parameter.

In: Dynamo's graph with the stores that its trace has seen, then the step graph made of it. Out: for
`StepGraph.kept`, the returned nodes with the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.roles.local_parts import returned_positions
from cotrain_compile.graph import StepGraph, returned_values


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
    values: Sequence[Any],
) -> Mapping[str, str]:
    """The names of the returned nodes that are `kept` gradients, with their parameters'.

    `values` are the user's tensors that the inputs of `step` stand for. None where the ATen graph
    returns something else than Dynamo's, value by value.
    """
    count, params = kept
    returned = returned_values(step)
    names = {id(value): item.name for value, item in zip(values, step.inputs, strict=True)}
    positions = returned_positions(step.module.graph, count)
    return {
        node.name: names[id(params[position])]
        for node, position in zip(returned, positions, strict=True)
        if isinstance(node, fx.Node) and position in params and id(params[position]) in names
    }
