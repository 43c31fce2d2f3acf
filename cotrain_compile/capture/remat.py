"""Saved values: which forward values stock torch.compile would keep for the backward.

In: the captured graph; out: nodes of its forward. The rest is cheap to make again from them.

Private torch API used: `torch._functorch.partitioners.min_cut_rematerialization_partition`, which
wants a graph of forward and backward alone whose inputs are called `primals_*`, tags on nodes of
the backward and descriptions of the outputs. Tried on torch 2.11.0, 2.13.0 and 2.15.0.

Rematerialise: forward values are made again for the backward instead of being kept.

In: the captured graph, before anything is moved in it. Out: the same graph, with copies of forward
ops right before the backward ops that first use them. What is kept is what the user's checkpoints
say, or in addition torch's min-cut partitioner (`saved_values`). Random numbers are never drawn
again: what a random op made is kept. A trace has what is in a checkpoint once, and marked: to
dissolve the checkpoints is to take the marks away.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from cotrain_compile.capture.nodes.copies import Copier
from cotrain_compile.capture.nodes.phases import phases
from cotrain_compile.dataflow import Checkpoints, Phase
from cotrain_compile.graph.collectives import is_collective, is_wait
from cotrain_compile.graph.random_ops import has_random_tag, is_random

COPY = torch.ops.aten.copy_.default


def saved_values(graph: fx.Graph, checkpointed: Collection[fx.Node]) -> Collection[fx.Node]:
    """The forward values that the backward should keep; `checkpointed` ones are not among them."""
    phase = phases(graph)
    return [
        node
        for forward in _rounds(graph, phase)
        if (backward := _backward_of(graph, forward, phase))
        for node in _saved_in_round(graph, forward, backward, checkpointed)
    ]


def _rounds(graph: fx.Graph, phase: Mapping[str, Phase]) -> list[set[fx.Node]]:
    """The forward nodes of `graph`, by how often a backward comes before what they need.

    A forward may depend on a gradient (an adversarial batch, an adapted parameter). To the
    partitioner a forward comes before the whole backward, so each round is one of its own.
    """
    number: dict[fx.Node, int] = {}
    after_backward: set[fx.Node] = set()
    rounds: dict[int, set[fx.Node]] = {}
    for node in graph.nodes:
        sources, of = node.all_input_nodes, phase.get(node.name)
        is_forward = of is Phase.FORWARD
        number[node] = max(
            (number[n] + (is_forward and n in after_backward) for n in sources), default=0
        )
        if is_forward:
            rounds.setdefault(number[node], set()).add(node)
        elif of is Phase.BACKWARD or any(n in after_backward for n in sources):
            after_backward.add(node)
    return list(rounds.values())


def _backward_of(
    graph: fx.Graph, forward: Collection[fx.Node], phase: Mapping[str, Phase]
) -> set[fx.Node]:
    """The backward nodes that need a value of `forward`, directly or by other backward nodes."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if phase.get(node.name) is Phase.BACKWARD and any(
            source in forward or source in found for source in node.all_input_nodes
        ):
            found.add(node)
    return found


def _saved_in_round(
    graph: fx.Graph,
    forward_nodes: Collection[fx.Node],
    backward_nodes: Collection[fx.Node],
    checkpointed: Collection[fx.Node],
) -> list[fx.Node]:
    joint, original, forward_outputs = _joint(graph, forward_nodes, backward_nodes, checkpointed)
    # Merging equal ops would leave the merged ones with no value to be made from.
    with config.patch(cse=False):
        forward, _ = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=forward_outputs)
    (output,) = forward.graph.find_nodes(op="output")
    names = [value.name for value in output.args[0] if isinstance(value, fx.Node)]
    saved = [original[name] for name in names if name in original]
    return [node for node in saved if node not in checkpointed]


def _joint(
    graph: fx.Graph,
    forward: Collection[fx.Node],
    backward: Collection[fx.Node],
    checkpointed: Collection[fx.Node],
) -> tuple[fx.GraphModule, dict[str, fx.Node], int]:
    """`forward` and `backward` of `graph` as one graph; its nodes by name; the number of results of
    the forward, which come first."""
    # Checks, as that a class is one of so many, make no value.
    members = {n for n in (*forward, *backward) if n.target is not COPY and "val" in n.meta}
    inside = [n for n in graph.nodes if n in members]
    copies: dict[fx.Node, fx.Node] = {}
    joint = fx.Graph()
    sources = _inputs(graph, members)
    graphs = [node for node in sources if "val" not in node.meta]  # that members call
    for number, node in enumerate(node for node in sources if "val" in node.meta):
        copies[node] = joint.placeholder(f"primals_{number + 1}")
        copies[node].meta = {"val": node.meta["val"]}
    for node in graphs:
        copies[node] = joint.node_copy(node)
    for node in inside:
        copies[node] = joint.node_copy(node, copies.__getitem__)
        if node in checkpointed and has_random_tag(node):
            copies[node].target = _draws_nothing
        copies[node].meta = _tagged(node, node in backward, node in checkpointed)
    results = {n for n in inside if any(user not in members for user in n.users)}
    of_forward = [
        n for n in inside if n in forward and (n in results or _is_a_loss(n, forward, backward))
    ]
    of_backward = [node for node in inside if node in backward and node in results]
    output = joint.output(tuple(copies[node] for node in (*of_forward, *of_backward)))
    output.meta["desc"] = [None] * len(output.args[0])
    original = {copy.name: node for node, copy in copies.items()}
    called = {
        str(node.target): attrgetter(str(node.target))(graph.owning_module) for node in graphs
    }
    return fx.GraphModule(called, joint), original, len(of_forward)


def _is_a_loss(node: fx.Node, forward: Collection[fx.Node], backward: Collection[fx.Node]) -> bool:
    """Whether a backward starts from `node` of the forward, where it ends.

    It is a result also where the step does not return it: to the partitioner, what leads to no
    result of the forward is no part of it; all of that would be moved to the backward, to be kept.
    """
    return not any(user in forward for user in node.users) and any(
        user in backward and not any(source in backward for source in user.all_input_nodes)
        for user in node.users
    )


def _inputs(graph: fx.Graph, members: set[fx.Node]) -> list[fx.Node]:
    return [n for n in graph.nodes if n not in members and any(u in members for u in n.users)]


def _tagged(node: fx.Node, is_backward: bool, is_checkpointed: bool) -> dict[str, object]:
    meta = {"val": node.meta["val"]}
    if is_backward:
        return {**meta, "partitioner_tag": "must_be_in_backward"}
    if is_checkpointed:
        return {**meta, "recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    if is_drawn(node) or "recompute" in node.meta:
        return {**meta, "recompute": CheckpointPolicy.MUST_SAVE}
    return meta


def _draws_nothing(*_: Any, **__: Any) -> None:
    """Stands for an op that is made again and draws nothing, as attention without dropout.

    Of an op with the tag of random ones the partitioner would save a generator's state.
    """


RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

# What says that a node is in a checkpoint.
_MARKS = ("recompute", "ac_graph_id")

Saved = Callable[[fx.Graph, Collection[fx.Node]], Collection[fx.Node]]


def rematerialise(
    graph: fx.Graph, saved_values: Saved | None, *, dissolve: bool = False
) -> Checkpoints:
    """Make forward values again where that is asked for; returns what checkpoints ask for.

    `saved_values(graph, checkpointed)` says which forward values the backward may use as they are;
    without it these are all that the user's checkpoints do not cover. Where these are to
    `dissolve`, they cover nothing.
    """
    phase = phases(graph)
    forward = {n for n in graph.nodes if phase.get(n.name) is Phase.FORWARD}
    checkpointed = {node for node in forward if _is_checkpointed(node, forward)}
    backward = [n for n in graph.nodes if phase.get(n.name) is Phase.BACKWARD]
    needed = _needed_again(backward, checkpointed)
    asked = [node for node in graph.nodes if node in needed]
    if dissolve:
        for node in forward:
            for mark in _MARKS:
                node.meta.pop(mark, None)
        checkpointed = set()
    checkpoints = Checkpoints(tuple(node.name for node in asked), dissolve)
    if saved_values is None and not checkpointed:
        return checkpoints
    kept = forward - checkpointed
    if saved_values is not None:
        kept = set(saved_values(graph, checkpointed))
    free = forward - kept
    copier = Copier({node for node in free if not is_drawn(node)})
    for node in backward:
        copier.use_copies(node)
    for copy in copier.copies.values():
        copy.meta["autograd_backward"] = True
    graph.eliminate_dead_code()
    if dissolve:
        return checkpoints
    return Checkpoints(tuple(copier.copies[node].name for node in asked))


def _needed_again(backward: Iterable[fx.Node], free: Collection[fx.Node]) -> set[fx.Node]:
    """Those of `free` that the backward reads, and those of `free` that they are made from."""
    waiting = [source for node in backward for source in node.all_input_nodes]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in free and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def is_drawn(node: fx.Node) -> bool:
    """Whether `node` is what a random op or a collective makes, or an item of it."""
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node):
        return False
    return is_random(source) or is_collective(source) or is_wait(source)


def _is_checkpointed(node: fx.Node, forward: Collection[fx.Node]) -> bool:
    """Whether a checkpoint of the user's says that `node` is made again.

    What leaves the checkpoint is kept, as in eager; from it the next one starts.
    """
    if node.meta.get("recompute") not in RECOMPUTE or is_drawn(node):
        return False
    return all(
        user.meta.get("recompute") is not None
        and user.meta.get("ac_graph_id") == node.meta.get("ac_graph_id")
        for user in node.users
        if user in forward
    )
