"""Edges: all that orders tasks in a placed graph, to be left out one by one; and what orders mean.

A placed step in; out come its `Edge`s, and by `ordered_pairwise` whether it is free of races, found
by looking at every pair of accesses in the transitive closure of all that orders two events.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx

from cotrain_compile.analysis.races import StepEvent
from cotrain_compile.graph import StepGraph
from cotrain_compile.plan import Lane
from cotrain_compile.runtime.ops import TASKS, cotrain, host_region

WAITS = (cotrain.wait, cotrain.wait_previous)
THIRD = (cotrain.offload_into, cotrain.prefetch_into, cotrain.host_cast)


@dataclass(frozen=True)
class Edge:
    """Argument `position` of `node` names `task`, which comes before it."""

    node: fx.Node
    position: int
    task: str

    def __str__(self) -> str:
        return f"{self.task} before {self.node}, argument {self.position}"

    @contextmanager
    def left_out(self) -> Iterator[None]:
        whole = self.node.args
        names: Any = whole[self.position]
        rest = [name for name in names if name != self.task]
        self.node.args = (*whole[: self.position], rest, *whole[self.position + 1 :])
        try:
            yield
        finally:
            self.node.args = whole


def edges(placed: StepGraph) -> Iterator[Edge]:
    """Every edge that a plan has put into a graph."""
    for node in placed.nodes:
        if node.target in TASKS:
            for position in _positions(node):
                names: Any = node.args[position]
                for task in names:
                    yield Edge(node, position, str(task))


def _positions(node: fx.Node) -> range:
    """Where a node names the tasks that come before it."""
    if node.target in WAITS:
        return range(1)
    if node.target is host_region:
        return range(2, len(node.args), 2)  # the inputs are between the two
    return range(3 if node.target in THIRD else 2, len(node.args))


def ordered_pairwise(events: Sequence[StepEvent], persistent: Collection[str]) -> bool:
    """Whether in two steps, one after the other, each pair of accesses is ordered, or only read."""
    graph, accesses = _order(events), dict[object, list[tuple[Any, bool]]]()
    for step, (index, event) in itertools.product(range(2), enumerate(events)):
        for buffer in event.reads + event.writes:
            key = buffer if buffer in persistent else (step, buffer)
            accesses.setdefault(key, []).append(((step, index), buffer in event.writes))
    after = {node: nx.descendants(graph, node) for node in graph}
    left = _only_waited_for_in_the_next(events)
    for found in accesses.values():
        for (first, one_writes), (second, other_writes) in itertools.combinations(found, 2):
            may_be_left = events[second[1]].ends_step and events[first[1]].name in left
            matters = (one_writes or other_writes) and first != second and not may_be_left
            if matters and second not in after[first]:
                return False
    return True


def _only_waited_for_in_the_next(events: Sequence[StepEvent]) -> set[str]:
    device = [event for event in events if event.lane is Lane.DEVICE]
    waited = {name for event in device for name in event.after}
    return {name for event in device for name in event.after_previous} - waited


def _order(events: Sequence[StepEvent]) -> nx.DiGraph:
    graph = nx.DiGraph()
    last: dict[Lane, tuple[int, int]] = {}
    number = {event.name: i for i, event in enumerate(events) if event.lane is not Lane.DEVICE}
    for step, (index, event) in itertools.product(range(2), enumerate(events)):
        node = (step, index)
        graph.add_node(node)
        lanes = [Lane.DEVICE] if event.lane is Lane.HOST else [Lane.DEVICE, event.lane]
        graph.add_edges_from((last[lane], node) for lane in lanes if lane in last)
        graph.add_edges_from(((step, number[name]), node) for name in event.after)
        earlier = [number[name] for name in event.after_previous if step and name in number]
        graph.add_edges_from(((step - 1, other), node) for other in earlier)
        last[event.lane] = node
    return graph
