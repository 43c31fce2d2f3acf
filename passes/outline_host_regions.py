"""Outline the update of every parameter that the host runs as a subgraph of its own.

    %mul, %lerp, %copy_ ...  ->  host_region(%region_0, 'update.w', after, [%w, %g, %m, %v])

The region's inputs are whole storages: views of them are replayed inside, so that each storage
crosses the link once. The region writes its parameter and states in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from cotrain_compile.extract import buffer_names
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.positions import Positions
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.ops import host_region


def outline_host_regions(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with one `host_region` call per `HostRegion` of `plan`."""
    graph = step.module.graph
    buffer_of = buffer_names(step)
    nodes = {node.name: node for node in graph.nodes}
    positions = Positions(graph)
    for number, task in enumerate(plan.host_regions):
        members = [nodes[op] for op in task.ops]
        inputs = _inputs(members, buffer_of)
        name = f"region_{number}"
        step.module.add_submodule(name, _subgraph(step.module, members, inputs))
        with graph.inserting_after(positions.last_at(task.issue_after)):
            region = graph.get_attr(name)
            call = graph.call_function(
                host_region, (region, task.name, list(task.after), list(inputs))
            )
            region.append(call)
        positions.note(task.issue_after, call)
        _use_the_parameter_itself(members)
        for node in reversed(members):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    step.module.recompile()
    return step


def _inputs(members: list[fx.Node], buffer_of: Mapping[str, str]) -> list[fx.Node]:
    """What the region takes from outside: for every storage the node that made it."""
    inside = set(members)
    found: dict[fx.Node, None] = {}
    for node in members:
        for source in node.all_input_nodes:
            if source not in inside:
                found.setdefault(_base(source, buffer_of))
    return list(found)


def _base(node: fx.Node, buffer_of: Mapping[str, str]) -> fx.Node:
    """Follow views up to the node whose value is the storage itself."""
    while node.op == "call_function":
        shown = buffer_of.get(node.name)
        above = [n for n in node.all_input_nodes if shown and buffer_of.get(n.name) == shown]
        if not above:
            return node
        node = above[0]
    return node


def _subgraph(
    root: fx.GraphModule, members: list[fx.Node], inputs: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)

    def value_of(node: fx.Node) -> fx.Node:
        if node not in values:  # a view of an input, made outside
            values[node] = graph.node_copy(node, value_of)
        return values[node]

    for node in members:
        values[node] = graph.node_copy(node, value_of)
    graph.output(())
    return fx.GraphModule(root, graph, "HostRegion")


def _use_the_parameter_itself(members: list[fx.Node]) -> None:
    """Later readers of the written parameter read the parameter: the new value is moved there."""
    inside = set(members)
    for node in members:
        if node.target is torch.ops.aten.copy_.default:
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, node.args[0])  # type: ignore[arg-type]
