"""Run by layer: the ops of all micro-batches in the order of packs of layers.

    %mm_1, ..., %mm_1_backward, %mm_2, ..., %mm_2_backward
    ->   %mm_1, %mm_2, ..., %mm_1_backward, %mm_2_backward

A view that an op needs and that comes later is made again. What the graph becomes is, as data, what
`placement.order.by_layer` makes of the step.
"""

from __future__ import annotations

from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.views import available_before
from cotrain_compile.placement.order.by_layer import in_packs
from cotrain_compile.plan import Plan


def run_by_layer(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with its calls in the order of `plan`."""
    if not plan.placement.layers_per_pack:
        return step
    nodes = {node.name: node for node in step.nodes}
    dataflow = in_packs(extract(step), plan.placement.layers_per_pack)
    ordered = [nodes[op.name] for op in dataflow.ops]
    (output,) = step.module.graph.find_nodes(op="output")
    for node in ordered:  # one behind the other, and all behind the constants
        output.prepend(node)
    for node in ordered:
        for value in node.all_input_nodes:
            node.replace_input_with(value, available_before(node, value))
    step.module.recompile()
    return step
