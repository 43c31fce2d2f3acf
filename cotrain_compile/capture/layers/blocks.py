"""Blocks: the nodes of alike layers side by side, and whether they are alike.

A sweep is a stretch of a graph in which layer after layer has one run of nodes, up or down: the
forward, the backward, each op of an update. The block of a layer is its run in each sweep. Two
blocks are alike if their nodes are the same calls, of the same things at the same places of the
same layer, of the one before or of the one behind, with results that look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from cotrain_compile.capture.layers.labels import (
    Labels,
    Stack,
    entry_of_gather,
    phase_of,
    subgraph_of,
)

Place = tuple[int, int, int]
"""The layer, the sweep, and which node of the layer's run there."""


class UnlikeError(Exception):
    """A graph does not repeat itself as it would have to; the text says what is in the way."""


@dataclass(frozen=True)
class Run:
    """Consecutive nodes of one layer, or of none."""

    layer: int | None
    nodes: Sequence[fx.Node]


def runs_of(graph: fx.Graph, labels: Labels) -> list[Run]:
    """The nodes of `graph` in runs of one layer and phase."""
    runs: list[Run] = []
    key: object = None
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        now = labels.layer.get(node), phase_of(node)
        if now != key or not runs:
            nodes, key = [], now
            runs.append(Run(now[0], nodes))
        nodes.append(node)
    return runs


@dataclass(frozen=True)
class Blocks:
    """Layers `first` to `last` in sweeps, with that before the first.

    `steps` has by sweep whether layers go up (1) or down (-1).
    """

    first: int
    last: int
    steps: Sequence[int]
    runs: Mapping[tuple[int, int], Sequence[fx.Node]]
    place: Mapping[fx.Node, Place]


def blocks_of(runs: Sequence[Run], layers: Sequence[int], *, least: int = 2) -> Blocks:
    """The blocks of consecutive `layers`: that before, then as many as stand side by side.

    `layers` are ascending numbers, that follow each other in `runs`. Raises `UnlikeError` where
    fewer than `least` of them follow the second.
    """
    before, first = layers[:2]
    places = [i for i, run in enumerate(runs) if run.layer == first]
    if not places:
        raise UnlikeError(f"layer {first} has no nodes")
    steps = [_step(runs, place, before, layers[2]) for place in places]
    found: dict[tuple[int, int], Sequence[fx.Node]] = {}
    counts: dict[int | None, int] = {}
    for run in runs:
        counts[run.layer] = counts.get(run.layer, 0) + 1
    last = before
    for distance, layer in enumerate(layers, -1):
        reached = [place + step * distance for place, step in zip(places, steps, strict=True)]
        if any(not 0 <= i < len(runs) or runs[i].layer != layer for i in reached):
            break
        found |= {(layer, sweep): runs[i].nodes for sweep, i in enumerate(reached)}
        last = layer
        if layer not in (before, first) and counts[layer] != len(places):
            break  # it has more than its part in the sweeps, so it can be the last one only
    if layers.index(last) < 1 + least:
        raise UnlikeError(f"layers from {first} on do not stand side by side")
    place = {
        node: (layer, sweep, i)
        for (layer, sweep), nodes in found.items()
        for i, node in enumerate(nodes)
    }
    return Blocks(first, last, steps, found, place)


def _step(runs: Sequence[Run], place: int, before: int, behind: int) -> int:
    """Whether the layer behind that of a run comes after it (1) or stood before it (-1)."""
    around = [runs[i].layer if 0 <= i < len(runs) else None for i in (place - 1, place + 1)]
    if around == [before, behind]:
        return 1
    if around == [behind, before]:
        return -1
    raise UnlikeError(f"a run of layer {runs[place].layer} stands between {around}")


@dataclass(frozen=True)
class Forms:
    """The forms of blocks: equal for layers that are alike.

    `order` has the layers in turn, `rank` where each stands; `own` the number of each placeholder
    among those of its layer, and `look` what a node's result looks like.
    """

    stack: Stack
    blocks: Blocks
    labels: Labels
    order: Sequence[int]
    rank: Mapping[int, int]
    own: Mapping[fx.Node, int]
    look: Callable[[fx.Node, Callable[[fx.Node], object]], object]

    def of(self, layer: int) -> list[object]:
        """The form of a layer's block, node by node."""
        return [
            (sweep, self._node(node, layer))
            for sweep in range(len(self.blocks.steps))
            for node in self.blocks.runs[layer, sweep]
        ]

    def _node(self, node: fx.Node, layer: int) -> object:
        def read(other: Any) -> object:
            return self.read(other, layer) if isinstance(other, fx.Node) else (type(other), other)

        if node.op == "placeholder":
            return "placeholder", self.own[node], self.look(node, read)
        return self._call(node, layer, read)

    def _call(self, node: fx.Node, layer: int, read: Callable[[Any], object]) -> object:
        """What a call is, where `read` says what its arguments are."""
        called = subgraph_of(node)
        return (
            node.op,
            node.target if called is None else self._subgraph(called, layer),
            self._arguments(node, read),
            map_aggregate(node.kwargs, read),  # type: ignore[arg-type]
            node.meta.get("stack_trace"),
            node.meta.get("recompute"),
            self._called_by(node, layer),
            self.look(node, read),
        )

    def _subgraph(self, module: fx.GraphModule, layer: int) -> object:
        """A graph that a layer calls, as of a checkpoint, node by node; whatever its name is."""
        place = {node: i for i, node in enumerate(module.graph.nodes)}

        def read(other: Any) -> object:
            return ("inside", place[other]) if isinstance(other, fx.Node) else (type(other), other)

        return tuple(module.meta.items()), [
            (node.op, self.look(node, read))
            if node.op == "placeholder"
            else self._call(node, layer, read)
            for node in module.graph.nodes
        ]

    def _arguments(self, node: fx.Node, read: Callable[[Any], object]) -> object:
        """What a node is called with; of a list of results, for which entry it reads one."""
        entry = entry_of_gather(node, self.labels)
        if entry is not None:
            return read(node.args[0]), read(entry)
        return map_aggregate(node.args, read)  # type: ignore[arg-type]

    def _called_by(self, node: fx.Node, layer: int) -> tuple[tuple[str, object], ...]:
        """The modules that called a node, as in the first layer."""
        calls = (node.meta.get("nn_module_stack") or {}).values()
        return tuple((self.stack.named_anew(path, -layer), kind) for path, kind in calls)

    def read(self, node: fx.Node, layer: int) -> object:
        """What a layer reads: something of its own, of a neighbour, or the same for all."""
        if node.op == "placeholder":
            owner = self.labels.layer.get(node)
            if owner is None:
                return "input", node.name
            return "own", self._away(owner, layer, node), self.own[node]
        if node in self.blocks.place:
            owner, sweep, place = self.blocks.place[node]
            return "layer", self._away(owner, layer, node), sweep, place
        return "same", node.name

    def _away(self, owner: int, layer: int, node: fx.Node) -> int:
        distance = self.rank[owner] - self.rank[layer]
        if abs(distance) > 1:
            raise UnlikeError(f"layer {layer} reads {node.name}, of layer {owner}")
        return distance


def own_numbers(graph: fx.Graph, labels: Labels) -> dict[fx.Node, int]:
    """The number of each placeholder among those of its layer."""
    counts: dict[int | None, int] = {}
    numbers = {}
    for node in graph.find_nodes(op="placeholder"):
        layer = labels.layer.get(node)
        numbers[node] = counts.get(layer, 0)
        counts[layer] = numbers[node] + 1
    return numbers


def look_of_tensor(value: object) -> object:
    """What of a tensor decides how it is lowered; of anything else, itself.

    Sizes that are symbols are alike where they are the same expression: to compare their values
    would be a guard, which nobody can make of a size that hangs on data.
    """
    if not isinstance(value, torch.Tensor):
        return type(value), _expression(value)
    return (
        type(value),
        _expressions(value.shape),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_leaf,
        value.layout,
        value.is_conj(),
        value.is_neg(),
        _expressions((*value.stride(), value.storage_offset(), value.untyped_storage().nbytes()))
        if value.layout is torch.strided
        else id(value),
    )


def _expressions(sizes: Iterable[object]) -> tuple[object, ...]:
    return tuple(map(_expression, sizes))


def _expression(value: object) -> object:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return value


def look_before(node: fx.Node, read: object) -> object:
    """Of a node of Dynamo's graph."""
    value = node.meta.get("example_value")
    return [look_of_tensor(leaf) for leaf in tree_leaves(value)], phase_of(node)


def follow(order: Sequence[int]) -> bool:
    """Whether numbers are consecutive."""
    return all(b - a == 1 for a, b in pairwise(order))
