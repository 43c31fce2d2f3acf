"""Outline the update of every parameter that the host runs as a subgraph of its own.

    %mul, %lerp, %copy_ ...  ->  host_region(%region_0, 'update.w', after, [%w, %g, %m, %v])

The region's inputs are inputs of the step and the storages that the plan offloads. What else it
needs is replayed inside: views, so that each storage crosses the link once, and what follows from
hyper-parameters alone. The region writes its parameter and states in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from cotrain_compile.extract import buffer_names
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.passes.positions import Positions
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.ops import host_region

COPY = torch.ops.aten.copy_.default


def outline_host_regions(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with one `host_region` call per `HostRegion` of `plan`."""
    graph = step.module.graph
    buffer_of = buffer_names(step)
    nodes = {node.name: node for node in graph.nodes}
    offloaded = {task.buffer for task in plan.transfers if task.direction == "offload"}
    positions = Positions(graph)
    for number, task in enumerate(plan.host_regions):
        members = [nodes[op] for op in task.ops]
        inputs = _inputs(members, buffer_of, offloaded)
        name = f"region_{number}"
        step.module.add_submodule(name, _subgraph(step.module, members, inputs))
        anchor = positions.anchor(task.issue_after, inputs)
        with graph.inserting_after(positions.last_at(anchor)):
            region = graph.get_attr(name)
            call = graph.call_function(
                host_region, (region, task.name, list(task.after), list(inputs))
            )
            region.append(call)
        positions.note(anchor, call)
        _use_the_parameter_itself(members)
        for node in reversed(members):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    step.module.recompile()
    return step


def _inputs(
    members: list[fx.Node], buffer_of: Mapping[str, str], offloaded: set[str]
) -> list[fx.Node]:
    """Where the region begins: inputs of the step, and the makers of offloaded storages."""
    found: dict[fx.Node, None] = {}
    seen = set(members)
    queue = [source for node in members for source in node.all_input_nodes]
    for node in queue:  # grows while it is read
        if node in seen:
            continue
        if node.target is COPY:
            queue.append(_written_by(node))
            continue
        seen.add(node)
        if node.op != "call_function" or _makes(node, buffer_of, offloaded):
            found.setdefault(node)
        else:
            queue += node.all_input_nodes
    return list(found)


def _written_by(write: fx.Node) -> fx.Node:
    """The tensor that an in-place write leaves its value in. A write itself is never replayed."""
    destination = write.args[0]
    assert isinstance(destination, fx.Node)
    return destination


def _makes(node: fx.Node, buffer_of: Mapping[str, str], offloaded: set[str]) -> bool:
    """Whether `node` makes one of the `offloaded` storages, as opposed to viewing it."""
    shown = buffer_of.get(node.name)
    is_view = any(buffer_of.get(source.name) == shown for source in node.all_input_nodes)
    return shown in offloaded and not is_view


def _subgraph(
    root: fx.GraphModule, members: list[fx.Node], inputs: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)

    def value_of(node: fx.Node) -> fx.Node:
        if node not in values:
            written = node.target is COPY
            values[node] = (
                value_of(_written_by(node)) if written else graph.node_copy(node, value_of)
            )
        return values[node]

    for node in members:
        values[node] = graph.node_copy(node, value_of)
    graph.output(())
    return fx.GraphModule(root, graph, "HostRegion")


def _use_the_parameter_itself(members: list[fx.Node]) -> None:
    """Later readers of the written parameter read the parameter: the new value is moved there."""
    inside = set(members)
    for node, parameter, _ in writes(members[0].graph):
        for user in [user for user in node.users if node in inside and user not in inside]:
            user.replace_input_with(node, parameter)
