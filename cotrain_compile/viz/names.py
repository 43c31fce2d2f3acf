"""Names: what readers call ops, buffers and tasks: by module, operation and line, not by node.

`mm_25` is `model.layers.3.mlp.gate_proj: mm`, called at `modeling_llama.py:176`. What is alike in
all layers has one name when folded: `model.layers.*.mlp.gate_proj: mm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from cotrain_compile.dataflow import Dataflow, Op, Role
from cotrain_compile.plan import HostRegion, Task, Transfer, exchange_of
from cotrain_compile.viz.layers import REST, layers

_TARGET = re.compile(r"\w+\.(\w+)(?:\.\w+)?|<built-in function (\w+)>")


@dataclass(frozen=True)
class Names:
    """The readers' names of ops (and of what they exchange) and buffers, and what each op is."""

    of_op: Mapping[str, str]
    of_buffer: Mapping[str, str]
    what: Mapping[str, str]

    def of_task(self, task: Task) -> str:
        match task:
            case Transfer():
                return f"{task.direction} {self.of_buffer.get(task.buffer, task.buffer)}"
            case HostRegion():
                return f"{'cast' if task.makes else 'update'} {task.param}"
            case _:
                assert_never(task)


def names(dataflow: Dataflow) -> Names:
    """What readers call the ops and buffers of `dataflow`, which is a step as placed."""
    modules = layers(dataflow).module_of_op
    of_op = {op.name: _in_module(modules[op.name], operation(op.target)) for op in dataflow.ops}
    exchanges = {exchange_of(op.name): of_op[op.name] for op in dataflow.ops if op.collective}
    of_buffer = {b.name: b.name for b in dataflow.buffers}
    for op in reversed(dataflow.ops):  # the first that writes it has made it
        made = (n for n in op.writes if dataflow.buffer[n].role in (Role.TEMPORARY, Role.WORKSPACE))
        of_buffer |= dict.fromkeys(made, of_op[op.name])
    for group in dataflow.updates:
        if group.low_precision:
            of_buffer[group.low_precision] = f"{group.param} in low precision"
        of_buffer[group.gradient] = f"gradient of {group.param}"
    return Names(of_op | exchanges, of_buffer, {op.name: _what(op) for op in dataflow.ops})


def operation(target: str) -> str:
    """`aten.mm.default` -> `mm`; what is called otherwise stays as it is."""
    found = _TARGET.fullmatch(target)
    return next(filter(None, found.groups()), target) if found else target


def folded(name: str) -> str:
    """The same for all layers: the first number between dots is a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|:|$)", "*", name, count=1)


def _in_module(module: str, does: str) -> str:
    return does if module == REST else f"{module}: {does}"


def _what(op: Op) -> str:
    return f"{op.target} at {op.line}" if op.line else op.target
