"""Halves: what is of a layer's forward, and what of its backward.

A layer in a checkpoint that the step follows has two forwards: one of which nothing is kept, and
one that runs in the backward, whose values that reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.dataflow import Phase
from cotrain_compile.graph import StepGraph


@dataclass(frozen=True)
class Halves:
    """The halves of the layers of a step."""

    step: StepGraph

    @cached_property
    def again(self) -> frozenset[str]:
        """The names of what checkpoints run in the backward."""
        marked = self.step.checkpoints
        return frozenset(() if marked.dissolved else marked.values)

    def is_forward(self, node: fx.Node) -> bool:
        """Whether it is of a forward, be it the second one."""
        return self._is_first(node) or node.name in self.again

    def beside(self, node: fx.Node, others: Iterable[fx.Node]) -> list[fx.Node]:
        """Those of `others` that are of the same forward as `node`."""
        if node.name in self.again:
            return [other for other in others if other.name in self.again]
        return list(filter(self._is_first, others))

    def is_backward(self, node: fx.Node) -> bool:
        """Whether it is of a backward, or shows what may be."""
        in_backward = self.step.phases.get(node.name) is Phase.BACKWARD
        return (in_backward and node.name not in self.again) or is_view(node)

    def _is_first(self, node: fx.Node) -> bool:
        return self.step.phases.get(node.name, Phase.FORWARD) is Phase.FORWARD
