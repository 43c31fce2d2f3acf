"""Calls: what a rule is given of a call in parts, and what it answers.

In: a call, and which of its arguments come in parts, with their rows. Out: a `PartResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from cotrain_compile.extract.regions.rows import Rows
from cotrain_compile.graph.op_calls import arguments_of


class Sum:
    """What a part makes is its share of a sum over all rows."""


class CountedRows:
    """How many rows count for the loss, which no part knows: it is counted beforehand."""


class Own:
    """Each part has its own in full, as the seed of a kernel, and no other op reads the whole."""


SUM, COUNTED, OWN = Sum(), CountedRows(), Own()
# Of one result, or of each of several.
Result = Rows | Sum | CountedRows | Own | None


@dataclass(frozen=True)
class PartResult:
    """What a part makes; `needs` are the rows it needs of arguments made outside of the parts.

    `ends` are the arguments that say behind which rows groups of them end: a part has its own,
    counted from its first row.
    """

    made: Result | tuple[Result, ...]
    needs: Mapping[fx.Node, Rows] = field(default_factory=dict)
    ends: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class PartCall:
    """A call with the rows of those of its arguments that come in parts."""

    node: fx.Node
    rows: Mapping[fx.Node, Rows]
    length: int

    def argument(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return arguments_of(self.node)

    @property
    def shape(self) -> Sequence[int]:
        """Of its result, or of the first of several."""
        return shape_of(self.node)


def shape_of(node: fx.Node) -> Sequence[int]:
    """The shape of what a node makes, of several results that of the first there is."""
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        value = next(each for each in value if each is not None)
    return value.shape  # type: ignore[no-any-return]


Rule = Callable[[PartCall], PartResult | None]
