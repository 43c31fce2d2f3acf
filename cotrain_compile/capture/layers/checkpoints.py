"""Checkpoints: which nodes of an ATen graph are in which, and numbers for those of copies."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from torch import fx

from cotrain_compile.capture.layers.blocks import UnlikeError
from cotrain_compile.capture.layers.labels import Labels

NUMBER = "ac_graph_id"


class LayerCheckpoints:
    """The checkpoints of a graph: each has a number, which its nodes carry."""

    def __init__(self, graph: fx.Graph) -> None:
        self.members: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            if (number := node.meta.get(NUMBER)) is not None:
                self.members.setdefault(number, []).append(node)
        self.unused = count(max(self.members, default=0) + 1)
        self.anew: dict[tuple[int, int], int] = {}  # by a number of the template's, and layer

    def first_of(self, node: fx.Node) -> fx.Node | None:
        """The first node of the checkpoint that `node` is in."""
        number = node.meta.get(NUMBER)
        return None if number is None else self.members[number][0]

    def check(self, labels: Labels, layers: Collection[int]) -> None:
        """Raise where one of `layers` shares a checkpoint with anything else."""
        for nodes in self.members.values():
            owners = {labels.layer.get(node) for node in nodes}
            if len(owners) > 1 and owners & {*layers}:
                raise UnlikeError(f"a checkpoint is around more than a layer, from {nodes[0]} on")

    def number_anew(self, node: fx.Node, layer: int) -> None:
        """Have a node that is copied into `layer` in a checkpoint of that one's own."""
        number = node.meta.get(NUMBER)
        if number is not None:
            if (number, layer) not in self.anew:
                self.anew[number, layer] = next(self.unused)
            node.meta[NUMBER] = self.anew[number, layer]
