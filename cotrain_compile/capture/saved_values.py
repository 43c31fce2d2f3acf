"""Saved values: which forward values stock torch.compile would keep for the backward.

In: the captured graph; out: nodes of its forward. The rest is cheap to make again from them.

Private torch API used: `torch._functorch.partitioners.min_cut_rematerialization_partition`, which
wants a graph of forward and backward alone whose inputs are called `primals_*`, tags on nodes of
the backward and descriptions of the outputs. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from cotrain_compile.capture.phases import phases
from cotrain_compile.capture.rematerialise import is_random
from cotrain_compile.dataflow import Phase

COPY = torch.ops.aten.copy_.default


def saved_values(graph: fx.Graph, checkpointed: Collection[fx.Node]) -> Collection[fx.Node]:
    """The forward values that the backward should keep; `checkpointed` ones are not among them."""
    joint, original, forward_outputs = _joint(graph, checkpointed)
    # Merging equal ops would leave the merged ones with no value to be made from.
    with config.patch(cse=False):
        forward, _ = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=forward_outputs)
    (output,) = forward.graph.find_nodes(op="output")
    names = [value.name for value in output.args[0] if isinstance(value, fx.Node)]
    return [original[name] for name in names if name in original]


def _joint(
    graph: fx.Graph, checkpointed: Collection[fx.Node]
) -> tuple[fx.GraphModule, dict[str, fx.Node], int]:
    """Forward and backward of `graph` as one graph; its nodes by name; the number of results of
    the forward, which come first."""
    phase = phases(graph)
    parts = {Phase.FORWARD, Phase.BACKWARD}
    inside = [n for n in graph.nodes if phase.get(n.name) in parts and n.target is not COPY]
    copies: dict[fx.Node, fx.Node] = {}
    joint = fx.Graph()
    members = set(inside)
    for number, node in enumerate(_inputs(graph, members)):
        copies[node] = joint.placeholder(f"primals_{number + 1}")
        copies[node].meta = {"val": node.meta["val"]}
    for node in inside:
        copies[node] = joint.node_copy(node, copies.__getitem__)
        copies[node].meta = _tagged(node, phase[node.name], node in checkpointed)
    results = [n for n in inside if any(user not in members for user in n.users)]
    of_forward = [node for node in results if phase[node.name] is Phase.FORWARD]
    of_backward = [node for node in results if phase[node.name] is Phase.BACKWARD]
    output = joint.output(tuple(copies[node] for node in (*of_forward, *of_backward)))
    output.meta["desc"] = [None] * len(results)
    original = {copy.name: node for node, copy in copies.items()}
    return fx.GraphModule({}, joint), original, len(of_forward)


def _inputs(graph: fx.Graph, members: set[fx.Node]) -> list[fx.Node]:
    return [n for n in graph.nodes if n not in members and any(u in members for u in n.users)]


def _tagged(node: fx.Node, phase: Phase, is_checkpointed: bool) -> dict[str, object]:
    meta = {"val": node.meta["val"]}
    if phase is Phase.BACKWARD:
        return {**meta, "partitioner_tag": "must_be_in_backward"}
    if is_checkpointed:
        return {**meta, "recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    if is_random(node) or "recompute" in node.meta:
        return {**meta, "recompute": CheckpointPolicy.MUST_SAVE}
    return meta
