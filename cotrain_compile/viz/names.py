"""Names: what readers call ops, buffers and tasks: by module, operation and line, not by node.

`mm_25` is `model.layers.3.mlp.gate_proj: mm`, called at `modeling_llama.py:176`. What is alike in
all layers has one name when folded: `model.layers.*.mlp.gate_proj: mm`.

A layer (`Layers`) is a module path up to its first number (`model.layers.17`), or the whole path
without one. The backward and the updates are outside all modules; an op there belongs to the layer
of what it touches: a parameter, its gradient, its states, else an activation that a layer has made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer
from cotrain_compile.plan.timeline import exchange_of

# What belongs to no layer: scalars, clipping.
REST = "rest"
# What Dynamo calls a model that is a global or local variable: `G['model']`.
_ROOTS = ("G[", "L[")


@dataclass(frozen=True)
class Layers:
    """The module of each op and of each buffer that has one, by name, and the layers of both."""

    module_of_op: Mapping[str, str]
    module_of_buffer: Mapping[str, str]

    @cached_property
    def of_op(self) -> Mapping[str, str]:
        return {name: layer(module) for name, module in self.module_of_op.items()}

    @cached_property
    def of_buffer(self) -> Mapping[str, str]:
        return {name: layer(module) for name, module in self.module_of_buffer.items()}

    def of_tasks(self, plan: Plan) -> dict[str, str]:
        """The layer of each task of `plan`."""
        return {task.name: self.of_buffer.get(_buffer(task), REST) for task in plan.tasks}


def _buffer(task: Task) -> str:
    match task:
        case Transfer():
            return task.buffer
        case HostRegion():
            return task.param
        case _:
            assert_never(task)


def layer(path: str) -> str:
    """`model.layers.17.mlp.weight` -> `model.layers.17`, `lm_head` -> `lm_head`."""
    parts = path.split(".")
    numbers = (index for index, part in enumerate(parts) if part.isdigit())
    first = next(numbers, None)
    return path if first is None else ".".join(parts[: first + 1])


def layers(dataflow: Dataflow) -> Layers:
    """The module and layer of each op and buffer of `dataflow`."""
    of_buffer = _of_parameters(dataflow)
    own = {name: group.param for group in dataflow.updates for name in group.ops}
    of_op: dict[str, str] = {}
    before = dict.fromkeys(Phase, REST)
    for op in dataflow.ops:
        if op.name in own:
            found = of_buffer[own[op.name]]
        elif op.module:
            found = REST if op.module.startswith(_ROOTS) and "." not in op.module else op.module
        else:
            found = _touched(op, of_buffer) or before[op.phase]
        of_op[op.name] = before[op.phase] = found
        if op.phase is not Phase.OPTIMIZER:
            for name in op.writes:
                of_buffer.setdefault(name, found)
    return Layers(of_op, of_buffer)


def _of_parameters(dataflow: Dataflow) -> dict[str, str]:
    params = [b.name for b in dataflow.buffers if b.role in (Role.PARAM, Role.BUFFER)]
    found = {name: name.rpartition(".")[0] or name for name in params}
    for group in dataflow.updates:
        own = (group.gradient, *group.states, *((group.low_precision,) * bool(group.low_precision)))
        found |= dict.fromkeys(own, found[group.param])
    return found


def _touched(op: Op, of_buffer: Mapping[str, str]) -> str | None:
    """The module of what `op` reads or overwrites; the last argument is the most telling one."""
    known: Iterable[str] = (
        of_buffer[n] for n in reversed((*op.reads, *op.writes)) if n in of_buffer
    )
    return next(iter(known), None)


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
