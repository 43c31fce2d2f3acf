"""Insert the copies between tiers.

    %h = cotrain.offload(%g, 'offload.g', [])                    a fresh copy on the host
    cotrain.prefetch_into(%w, %h_w, 'prefetch.w', ['update.w'])  over an existing device buffer

Host regions then take the host copies.
"""

from __future__ import annotations

from torch import fx

from cotrain_compile.extract import buffer_names
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.positions import Positions
from cotrain_compile.plan import Plan, Transfer
from cotrain_compile.runtime.ops import cotrain, host_region


def insert_transfers(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with one transfer node per `Transfer` of `plan`, at its place of issue."""
    graph = step.module.graph
    buffer_of = buffer_names(step)
    source: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.name in buffer_of:
            source.setdefault(buffer_of[node.name], node)
    regions = {node.args[1]: node for node in graph.nodes if node.target is host_region}
    positions = Positions(graph)
    host_copy: dict[str, fx.Node] = {}
    for task in plan.transfers:
        if task.direction == "offload":
            anchor = positions.anchor(task.issue_after, [source[task.buffer]])
            place = positions.last_at(anchor)
            host_copy[task.buffer] = _offload(graph, place, source[task.buffer], task)
            positions.note(anchor, host_copy[task.buffer])
    for task in plan.transfers:
        if task.direction == "prefetch":
            region = regions[task.after[0]]
            with graph.inserting_after(region):
                graph.call_function(
                    cotrain.prefetch_into,
                    (source[task.buffer], host_copy[task.buffer], task.name, list(task.after)),
                )
    sent = {source[name]: copy for name, copy in host_copy.items()}
    for region in regions.values():
        region.args = (*region.args[:3], [sent.get(node, node) for node in region.args[3]])
    step.module.recompile()
    return step


def _offload(graph: fx.Graph, place: fx.Node, source: fx.Node, task: Transfer) -> fx.Node:
    with graph.inserting_after(place):
        node = graph.call_function(cotrain.offload, (source, task.name, list(task.after)))
    node.meta["val"] = source.meta.get("val")
    return node
