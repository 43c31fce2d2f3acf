"""Kept gradients: the buffers that are found in, or kept in, the `.grad` of a parameter.

In: a StepGraph and the buffer that each node shows. Out: their parameters. A gradient that shares
its storage with something else (a flat buffer of all gradients, a tensor that the step returns a
second time) is left out: nothing says where it rests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import fx

from cotrain_compile.dataflow import Role
from cotrain_compile.graph import StepGraph, returned_values


def gradients_kept(step: StepGraph, buffer_of: Mapping[str, str]) -> dict[str, str]:
    """The parameter of each buffer that is a gradient kept across calls, by buffer."""
    inputs = [buffer_of[item.node] for item in step.inputs if item.node in buffer_of]
    shared = {buffer for buffer, count in Counter(inputs).items() if count > 1}
    params = {item.name: buffer_of[item.node] for item in step.inputs if item.role is Role.PARAM}
    found = {
        buffer_of[item.node]: params[item.param]
        for item in step.inputs
        if item.role is Role.GRADIENT and item.param in params
    }
    returned = Counter(
        buffer_of.get(node.name) for node in returned_values(step) if isinstance(node, fx.Node)
    )
    for node, param in step.kept.items():
        made = buffer_of.get(node)
        if made is not None and made not in inputs and returned[made] == 1 and param in params:
            found[made] = params[param]
    return {
        buffer: param
        for buffer, param in found.items()
        if buffer not in shared and param not in shared
    }
