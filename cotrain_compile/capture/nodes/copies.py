"""Copies: values made again, by copies of their nodes put where they are needed first.

In: the nodes that may be made again, and one after the other the nodes that read them. Out: these
read copies. What a copy reads is made again before it where it may be, and read as it is where not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set

from torch import fx

from cotrain_compile.capture.nodes.storages import read_instead, traced_again

# What a copy must not take along of a node: it would be taken for a part of the forward.
_OF_THE_FORWARD = ("nn_module_stack", "recompute", "ac_graph_id")


class Copier:
    """Makes one copy of each node of `again` that is asked for; `copies` has them by node.

    `name_of` says what the copy of a node of that name is to be called. With `items_at_once` all
    items of a tuple are taken right after it, else when they are needed.
    """

    def __init__(
        self,
        again: Set[fx.Node],
        name_of: Callable[[str], str] = str,
        *,
        items_at_once: bool = False,
    ) -> None:
        self.copies: dict[fx.Node, fx.Node] = {}
        self._again, self._name_of = again, name_of
        self._items_at_once = items_at_once

    def use_copies(self, reader: fx.Node) -> None:
        """Let `reader` read copies, which are made right before it where there are none yet."""
        for source in reader.all_input_nodes:
            if source in self._again:
                self._make(source, reader)
                read_instead(reader, source, self.copies[source])

    def _make(self, node: fx.Node, place: fx.Node) -> None:
        """Copies `node`; what it reads is copied first, without recursion: chains are long."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [] if last in self.copies else self._missing(last)
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if last not in self.copies:
                self._make_one(last, place)

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        """What must be there before a copy of `node`."""
        sources = node.all_input_nodes
        return [s for s in sources if s in self._again and s not in self.copies]

    def _make_one(self, node: fx.Node, place: fx.Node) -> None:
        self.copies[node] = self._copy(node, place)
        if self._items_at_once:
            for item in node.users:
                if item in self._again and item.target is operator.getitem:
                    self.copies[item] = self._copy(item, place)

    def _copy(self, node: fx.Node, place: fx.Node) -> fx.Node:
        with place.graph.inserting_before(place):
            copy = place.graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, lambda source: self.copies.get(source, source)),
                fx.map_arg(node.kwargs, lambda source: self.copies.get(source, source)),
                name=self._name_of(node.name),
            )
        self._note(node, copy)
        return copy

    def _note(self, node: fx.Node, copy: fx.Node) -> None:
        """Tell of `copy` what is known of `node`, and what is traced for it."""
        copy.meta = {k: v for k, v in node.meta.items() if k not in _OF_THE_FORWARD}
        copy.meta["val"] = traced_again(copy)  # with storages of its own, or of the copies
