"""A graph run op by op, every result counted by the meter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from cotrain_compile.machine import Tier
from cotrain_compile.runtime.meter import Meter


class MeteredProgram:
    """Runs the ops of `module` on one tier; a value is freed after its last use.

    `fx.Interpreter` does the same, but takes longer for a small graph than the ops in it.
    """

    def __init__(self, module: fx.GraphModule, tier: Tier) -> None:
        graph = module.graph
        self.module = module
        self._tier = tier
        self._inputs = list(graph.find_nodes(op="placeholder"))
        (self._output,) = graph.find_nodes(op="output")
        done_with = last_uses(graph)
        self._calls = [
            (node, done_with.get(node, ()))
            for node in graph.nodes
            if node.op in ("call_function", "get_attr")
        ]

    def run(self, inputs: Sequence[Any], meter: Meter) -> Any:
        """What the graph returns for `inputs`. May run on several threads at once."""
        values = dict(zip(self._inputs, inputs, strict=True))
        value = values.__getitem__
        for node, done_with in self._calls:
            if node.op == "get_attr":
                values[node] = getattr(self.module, str(node.target))
            else:
                arguments: Any = fx.node.map_arg(node.args, value)
                keywords: Any = fx.node.map_arg(node.kwargs, value) if node.kwargs else {}
                values[node] = node.target(*arguments, **keywords)
                meter.track(values[node], self._tier, node.name)
            for last in done_with:
                del values[last]
        return fx.node.map_arg(self._output.args[0], value)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that it is the last to use, its own where nobody does."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen:
                seen.add(value)
                found.setdefault(node, []).append(value)
    return found
