"""Layers: which layer of the model each op and buffer belongs to. A Dataflow in, names out.

A layer is a module path up to its first number (`model.layers.17`), or the whole path without one.
The backward and the updates are outside all modules; an op there belongs to the layer of what it
touches: a parameter, its gradient, its states, else an activation that a layer has made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer

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
