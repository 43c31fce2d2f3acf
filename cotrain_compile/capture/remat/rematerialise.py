"""Rematerialise: forward values are made again for the backward instead of being kept.

In: the captured graph, before anything is moved in it. Out: the same graph, with copies of forward
ops right before the backward ops that first use them. What is kept is what the user's checkpoints
say, or in addition torch's min-cut partitioner (`saved_values`). Random numbers are never drawn
again: what a random op made is kept. A trace has what is in a checkpoint once, and marked: to
dissolve the checkpoints is to take the marks away.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from cotrain_compile.capture.nodes.copies import Copier
from cotrain_compile.capture.nodes.phases import phases
from cotrain_compile.dataflow import Checkpoints, Phase
from cotrain_compile.graph.collectives import is_collective, is_wait
from cotrain_compile.graph.random_ops import is_random

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
