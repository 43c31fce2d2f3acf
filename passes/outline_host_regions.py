"""Outline what the host runs: updates of parameters, and casts of those that rest there.

    %mul, %lerp, %copy_ ...      ->  host_region(%region_0, 'update.w', after, [%w, %g, %m, %v])
                                     host_region(%region_0, 'speculate.w', after, [%w, %g, None])
    %_to_copy(%w, bfloat16)      ->  cotrain.host_cast(%w, bfloat16, 'cast.w', after)

An update becomes a subgraph of its own. Its inputs are inputs of the step and the storages that the
plan offloads. What else it needs is replayed inside: views, so that each storage crosses the link
once, and what follows from hyper-parameters alone, also where the plan offloads that: no update
waits for it. It writes its parameter and states in place.
An update on guesses shares the subgraph with the one that confirms it: None is what it guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from cotrain_compile.extract.extract import buffer_names
from cotrain_compile.extract.updates import from_hyperparameters
from cotrain_compile.graph import StepGraph, graph_module
from cotrain_compile.passes.views import COPY, viewed, written_by
from cotrain_compile.plan import HostRegion, Plan
from cotrain_compile.runtime.task_nodes import HostCast, RegionCall, insert, launch_of

CAST = torch.ops.aten._to_copy.default


def outline_host_regions(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with one call per `HostRegion` of `plan`, in place of the region's ops."""
    buffer_of = buffer_names(step)
    nodes = {node.name: node for node in step.nodes}
    offloaded = {task.buffer for task in plan.transfers if task.direction == "offload"}
    if plan.host_regions:
        offloaded.difference_update(buffer_of.get(n.name) for n in from_hyperparameters(step))
    speculations = {task.name: task for task in plan.speculations}
    for number, task in enumerate(plan.host_regions):
        members = [nodes[op] for op in task.ops]
        if task.makes:
            _outline_cast(members, task)
        elif not task.guesses:
            tasks = [*filter(None, [speculations.get(task.confirms)]), task]
            _outline_update(step, f"region_{number}", members, tasks, buffer_of, offloaded)
    step.module.recompile()
    return step


def _outline_cast(members: list[fx.Node], task: HostRegion) -> None:
    (cast,) = members
    assert cast.target is CAST and set(cast.kwargs) == {"dtype"}, f"{cast} is no plain cast"
    (source,), dtype = cast.all_input_nodes, cast.kwargs["dtype"]
    assert isinstance(dtype, torch.dtype)
    with cast.graph.inserting_before(cast):
        call = insert(cast.graph, HostCast(source, dtype, launch_of(task)))
    call.meta["val"] = cast.meta["val"]
    cast.replace_all_uses_with(call)
    cast.graph.erase_node(cast)


def _outline_update(
    step: StepGraph,
    name: str,
    members: list[fx.Node],
    tasks: Sequence[HostRegion],
    buffer_of: Mapping[str, str],
    offloaded: set[str],
) -> None:
    graph = step.module.graph
    inputs = _inputs(members, buffer_of, offloaded)
    step.module.add_submodule(name, _subgraph(step.module, members, inputs))
    with graph.inserting_before(members[-1]):
        for task in tasks:
            known = [None if buffer_of.get(n.name) in task.guesses else n for n in inputs]
            insert(graph, RegionCall(graph.get_attr(name), known, launch_of(task)))
    _use_the_parameter_itself(members)
    for node in reversed(members):
        graph.erase_node(node)


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
            queue.append(written_by(node))  # a write itself is never replayed
            continue
        seen.add(node)
        makes_offloaded = buffer_of.get(node.name) in offloaded and viewed(node) is None
        if node.op != "call_function" or makes_offloaded:
            found.setdefault(node)
        else:
            queue += node.all_input_nodes
    return list(found)


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
                value_of(written_by(node)) if written else _on_host(graph.node_copy(node, value_of))
            )
        return values[node]

    for node in members:
        values[node] = _on_host(graph.node_copy(node, value_of))
    graph.output(())
    return graph_module(root, graph)


def _on_host(node: fx.Node) -> fx.Node:
    """`node`, whose result is made on the host: a constant was traced on the compute device."""
    if node.kwargs.get("device") is not None:
        node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    return node


def _use_the_parameter_itself(members: list[fx.Node]) -> None:
    """Later readers of the written parameter read the parameter: the new value is moved there."""
    inside = set(members)
    for node in members:
        if node.target is COPY:
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, written_by(node))
