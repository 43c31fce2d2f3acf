"""Layers: which layer of the model each op of a step works for. A StepGraph in, names out.

A layer is a numbered module (`transformer.h.3`), the outermost one where they are nested; "" is
what surrounds the layers. Cut along them, a deep model falls into equal pieces.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.views import viewed


def layers(step: StepGraph, dataflow: Dataflow) -> Mapping[str, str]:
    """The layer of each op of `step`, by node name.

    A forward op is in the layer whose module called it, an op of an update in its parameter's. The
    trace of a backward knows no modules: there a layer begins where one of its parameters is read
    first, and so does it in what else has no module.
    """
    owner = {op: group.param for group in dataflow.updates for op in group.ops}
    found: dict[str, str] = {}
    current = ""
    for node in step.nodes:
        if node.op != "call_function":
            continue
        if node.name in owner:
            found[node.name] = layer(owner[node.name])
            continue
        if node.name in step.modules:
            current = layer(step.modules[node.name])
        else:
            read = [layer(name) for name in _params_read(step, node)]
            current = read[-1] if read else current
        found[node.name] = current
    return found


def layer(path: str) -> str:
    """The layer that a module or parameter lies in: `model.layers.3.mlp` -> `model.layers.3`."""
    parts = path.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ""


def _params_read(step: StepGraph, node: fx.Node) -> list[str]:
    if viewed(node) is not None:
        return []
    found = []
    for source in node.all_input_nodes:
        while (base := viewed(source)) is not None:
            source = base
        item = step.input_of_node.get(source.name)
        if item is not None and item.role is Role.PARAM:
            found.append(item.name)
    return found
