"""Symmetry: a flow graph with alike nodes merged, in which a minimum cut is the same.

A model's layers repeat, so the flow graph of its step has few kinds of nodes. Colour refinement
finds them: two nodes stay in one class while they exchange equal capacity with every other class
(an equitable partition). Averaging a flow over such classes keeps it a flow, so the minimum cut of
the merged graph equals that of the whole one, by linear-programming duality.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import TypeVar

import networkx

Node = TypeVar("Node", bound=Hashable)


def merged(
    graph: networkx.DiGraph[Node], kinds: Mapping[Node, Hashable]
) -> tuple[networkx.DiGraph[int], dict[Node, int]]:
    """`graph` with one node per class, and the class of each node.

    Nodes whose `kinds` differ are never merged. Edges without a capacity have an infinite one.
    """
    classes = _equitable_classes(graph, kinds)
    result: networkx.DiGraph[int] = networkx.DiGraph()
    result.add_nodes_from(sorted(set(classes.values())))
    for source, target, capacity in graph.edges(data="capacity", default=inf):
        edge = classes[source], classes[target]
        if edge[0] != edge[1]:
            paid = result.edges[edge]["capacity"] if result.has_edge(*edge) else 0
            result.add_edge(*edge, capacity=paid + capacity)
    return result, classes


def _equitable_classes(
    graph: networkx.DiGraph[Node], kinds: Mapping[Node, Hashable]
) -> dict[Node, int]:
    # Plain tuples: the rounds look at every edge again, and networkx takes its time for each.
    sent, received = _capacities(graph.succ), _capacities(graph.pred)
    classes = _numbered({node: kinds.get(node) for node in graph})
    while True:
        signatures = {
            node: (own, _exchanged(classes, sent[node]), _exchanged(classes, received[node]))
            for node, own in classes.items()
        }
        finer = _numbered(signatures)
        if len(set(finer.values())) == len(set(classes.values())):
            return classes
        classes = finer


def _capacities(
    neighbours: Mapping[Node, Mapping[Node, Mapping[str, float]]],
) -> dict[Node, tuple[tuple[Node, float], ...]]:
    """The neighbours of each node, with the capacity of the edge between them."""
    return {
        node: tuple((other, edge.get("capacity", inf)) for other, edge in edges.items())
        for node, edges in neighbours.items()
    }


def _exchanged(
    classes: Mapping[Node, int], edges: Sequence[tuple[Node, float]]
) -> frozenset[tuple[int, float]]:
    """Capacity to (or from) each class."""
    total: dict[int, float] = {}
    for node, capacity in edges:
        other = classes[node]
        total[other] = total.get(other, 0) + capacity
    return frozenset(total.items())


def _numbered(signatures: Mapping[Node, Hashable]) -> dict[Node, int]:
    numbers: dict[Hashable, int] = {}
    return {node: numbers.setdefault(value, len(numbers)) for node, value in signatures.items()}
