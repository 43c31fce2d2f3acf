"""Layers: which layer of the model each op works for, by what a Dataflow knows. No torch.

A layer is a numbered module (`transformer.h.3`), the outermost one where they are nested; "" is
what surrounds the layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_compile.dataflow import Dataflow, Role


def layers_of(dataflow: Dataflow) -> Mapping[str, str]:
    """The layer of each op, by name.

    A forward op is in the layer whose module called it, an op of an update in its parameter's. The
    trace of a backward knows no modules: there a layer begins where one of its parameters is read
    first, and so does it in what else has no module.
    """
    owner = {op: group.param for group in dataflow.updates for op in group.ops}
    params = {b.name for b in dataflow.buffers if b.role is Role.PARAM}
    found: dict[str, str] = {}
    current = ""
    for op in dataflow.ops:
        if op.name in owner:
            found[op.name] = layer(owner[op.name])
            continue
        if op.module:
            current = layer(op.module)
        elif op.writes:  # a view reads nothing
            read = [layer(name) for name in op.reads if name in params]
            current = read[-1] if read else current
        found[op.name] = current
    return found


def layer(path: str) -> str:
    """The layer that a module or parameter lies in: `model.layers.3.mlp` -> `model.layers.3`."""
    parts = path.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ""
