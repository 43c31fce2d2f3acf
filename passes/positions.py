"""Positions: where a plan's tasks go in a graph: after an op, in the order of the plan."""

from __future__ import annotations

from torch import fx


class Positions:
    """Finds the node to insert after, so that tasks issued after one op keep their order."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._last: dict[str | None, fx.Node] = {
            None: [node for node in graph.nodes if node.op == "placeholder"][-1]
        }

    def last_at(self, op: str | None) -> fx.Node:
        """The node after which the next task issued after `op` belongs (None: the step's start)."""
        return self._last[op] if op in self._last else self._nodes[op or ""]

    def note(self, op: str | None, node: fx.Node) -> None:
        """`node` has been inserted for `op`; the next one goes behind it."""
        self._last[op] = node
