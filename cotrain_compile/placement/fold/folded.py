"""Folded: a step with fewer ops, and the ops as written that each of them stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow


@dataclass(frozen=True)
class Folded:
    """A step in which each op stands for the ops that `parts` has for its name."""

    dataflow: Dataflow
    parts: Mapping[str, tuple[str, ...]]

    def behind(self, first: Folded) -> Folded:
        """The same of the step as written, of which `first` is the one that this was made of."""
        parts = {
            op: tuple(n for name in of for n in first.parts[name]) for op, of in self.parts.items()
        }
        return Folded(self.dataflow, parts)
