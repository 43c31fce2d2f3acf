"""After the update: what a host region does beside its optimizer, once that is done.

In: a region and the match of its update. Out: the captured ops behind it (a clamp, a projection,
another write), as a graph of the same inputs, which hold the new values by then.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from cotrain_compile.graph import writes
from cotrain_compile.runtime.host.gradient_prologue import OPS
from cotrain_compile.runtime.host.match_update import COPY, Match, ancestors, is_random


def after_update(region: fx.GraphModule, match: Match) -> fx.GraphModule | None:
    """The ops of `region` that neither are the update nor come before it.

    None where they cannot run after it: they read an old value that the update has overwritten.
    """
    before = ancestors(match.gradient)
    done = before.union(match.new, *map(ancestors, match.new))
    left = [node for node in region.graph.nodes if node.op in OPS and node not in done]
    if _any_random(left) and _any_random(before):
        return None  # which of them draws first may change
    try:
        return _Behind(region, match, before).graph_of(left)
    except _ReadsOldValue:
        return None


class _ReadsOldValue(Exception):
    """An op behind the update needs what is there no longer."""


class _Behind:
    """Builds the graph; what its ops share with those before them is computed again."""

    def __init__(self, region: fx.GraphModule, match: Match, before: set[fx.Node]) -> None:
        self._region, self._match = region, match
        self._graph = fx.Graph()
        inputs = region.graph.find_nodes(op="placeholder")
        self._values = {node: self._graph.placeholder(node.name) for node in inputs}
        written = list(writes(region.graph))
        self._written = {to for _, to, _ in written}
        # By the time these ops run.
        self._overwritten = {to for write, to, _ in written if write in before}
        self._overwritten |= set(match.new.values())

    def graph_of(self, left: Iterable[fx.Node]) -> fx.GraphModule:
        for node in left:
            if node.target is COPY:
                to, value = node.all_input_nodes
                self._values[node] = self._graph.call_function(
                    COPY, (self._values[to], self._new(value))
                )
            else:
                self._values[node] = self._graph.node_copy(node, self._new)
        self._graph.output(())
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._region, self._graph, "AfterUpdate")

    def _new(self, node: fx.Node) -> fx.Node:
        """The value that an op behind the update takes for `node`."""
        if node in self._match.new:
            return self._values[self._match.new[node]]
        if node in self._overwritten:
            raise _ReadsOldValue
        if node not in self._values:
            if is_random(node):
                raise _ReadsOldValue  # it would draw twice
            self._values[node] = self._graph.node_copy(node, self._again)
        return self._values[node]

    def _again(self, node: fx.Node) -> fx.Node:
        """The same for what is computed once more, from inputs that nothing writes."""
        is_new = node in self._match.new
        if not is_new and (node in self._written or node.target is COPY):
            raise _ReadsOldValue
        return self._new(node)


def _any_random(nodes: Iterable[fx.Node]) -> bool:
    return any(is_random(node) for node in nodes)
