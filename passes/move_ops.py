"""Move ops: updates that the device runs earlier than the step has them.

    %mm_2, ..., %mul, %copy_   ->   %mm_2, %mul, %copy_, ...

A view that an op needs and that comes later is made again.
"""

from __future__ import annotations

from torch import fx

from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.views import available_before
from cotrain_compile.plan import Plan


def move_ops(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with the ops of each `MovedOps` of `plan` right behind their anchor."""
    nodes: dict[str | None, fx.Node] = {node.name: node for node in step.nodes}
    place = {None: _start(step), **nodes}
    for entry in plan.moved:
        for name in entry.ops:
            place[entry.after].append(nodes[name])
            place[entry.after] = nodes[name]
    for name in [name for entry in plan.moved for name in entry.ops]:
        for value in nodes[name].all_input_nodes:
            nodes[name].replace_input_with(value, available_before(nodes[name], value))
    step.module.recompile()
    return step


def _start(step: StepGraph) -> fx.Node:
    """The node that the first op of the step comes after."""
    *_, last_input = step.module.graph.find_nodes(op="placeholder")
    assert isinstance(last_input, fx.Node)
    return last_input
