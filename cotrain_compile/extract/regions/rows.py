"""Rows: which dimensions of a value the rows of a region are in.

A value of N rows has them in one dimension, or in a few neighbours together: the tokens of a batch
of sequences are dimensions 0 and 1 of (batch, sequence, width), and dimension 0 of (tokens, width).
What the dimensions have more of than N belongs to a row: it is so many neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Rows:
    """The rows of a value are in its dimensions `first` to `last`, taken together."""

    first: int
    last: int

    @property
    def dims(self) -> range:
        return range(self.first, self.last + 1)

    def moved(self, by: int) -> Rows:
        """The same in a value with `by` dimensions more before them."""
        return Rows(self.first + by, self.last + by)


def rows_from(shape: Sequence[int], first: int, length: int) -> Rows | None:
    """`length` rows in the dimensions from `first` on, the fewest; None where there are none."""
    while first < len(shape) and shape[first] == 1:
        first += 1
    size = 1
    for last in range(first, len(shape)):
        size *= shape[last]
        if size % length == 0:
            return Rows(first, last)
    return None


def viewed_rows(
    rows: Rows, before: Sequence[int], after: Sequence[int], length: int
) -> Rows | None:
    """Where `rows` of a value of shape `before` are in a view of shape `after`."""
    outer = prod(before[: rows.first])
    size = 1
    for first in range(len(after) + 1):
        if size == outer:
            return rows_from(after, first, length)
        if first < len(after):
            size *= after[first]
    return None


def part_shape(shape: Sequence[int], rows: Rows, length: int, count: int) -> tuple[int, ...]:
    """The shape of `count` of the `length` rows of a value."""
    each = prod(shape[dim] for dim in rows.dims) // length
    sizes = list(shape)
    for dim in rows.dims:
        sizes[dim] = 1
    sizes[rows.last] = count * each
    return tuple(sizes)
