"""Positions: where a plan's tasks go in a graph: after an op, in the order of the plan."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


class Positions:
    """Finds the node to insert after, so that tasks issued after one op keep their order."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._start = [node for node in graph.nodes if node.op == "placeholder"][-1]
        self._last: dict[fx.Node, fx.Node] = {}

    def anchor(self, op: str | None, needs: Iterable[fx.Node]) -> fx.Node:
        """The node that a task issued after `op` (None: the step's start) belongs behind.

        That is `op`, or the last of what it `needs` where that comes later: the items of a tuple
        follow the op that made it.
        """
        anchor: fx.Node = max([self._start if op is None else self._nodes[op], *needs])
        return anchor

    def last_at(self, anchor: fx.Node) -> fx.Node:
        """The node after which the next task behind `anchor` is inserted."""
        return self._last.get(anchor, anchor)

    def note(self, anchor: fx.Node, node: fx.Node) -> None:
        """`node` has been inserted behind `anchor`; the next one goes behind it."""
        self._last[anchor] = node
