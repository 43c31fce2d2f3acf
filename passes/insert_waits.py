"""Insert the waits: the device goes on only when these tasks are done.

    cotrain.wait(['offload.g'], [%g])

A wait holds the source of each offload, so that its memory is freed there and nowhere else.
"""

from __future__ import annotations

from torch import fx

from cotrain_compile.graph import StepGraph
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.ops import cotrain


def insert_waits(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with one wait before each op that tasks of `plan` are waited for before."""
    graph = step.module.graph
    nodes = {node.name: node for node in graph.nodes}
    output = next(node for node in graph.nodes if node.op == "output")
    sources = {node.args[1]: node.args[0] for node in graph.nodes if node.target is cotrain.offload}
    waits: dict[fx.Node, list[str]] = {}
    for task in plan.tasks:
        place = output if task.wait_before is None else nodes[task.wait_before]
        waits.setdefault(place, []).append(task.name)
    for place, tasks in waits.items():
        kept = [sources[task] for task in tasks if task in sources]
        with graph.inserting_before(place):
            graph.call_function(cotrain.wait, (tasks, kept))
    step.module.recompile()
    return step
