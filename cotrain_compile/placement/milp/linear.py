"""Linear programs: columns, sums of them, and rows, as the programs of a search are written.

In: what a program adds, in arithmetic of columns. Out: a `LinearProgram`, whose `matrix` is what a
solver reads. A general library of this kind takes longer to write a program down than a solver
takes for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int32]


class Expression:
    """A sum of columns, by their numbers each with its coefficient, and of a `constant`."""

    __slots__ = ("constant", "terms")
    # `numpy` numbers leave arithmetic with expressions to these.
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, terms: dict[int, float], constant: float = 0.0) -> None:
        self.terms, self.constant = terms, constant

    def plus(self, other: Term, factor: float = 1.0) -> Expression:
        """Adds `factor` times `other` to this very expression, which nobody else may have."""
        if not isinstance(other, Expression):
            self.constant += factor * other
            return self
        terms = self.terms
        for column, share in other.terms.items():
            terms[column] = terms.get(column, 0.0) + factor * share
        self.constant += factor * other.constant
        return self

    def _copy(self) -> Expression:
        return _Combined(self.terms.copy(), self.constant)

    def __add__(self, other: Term) -> Expression:
        return self._copy().plus(other)

    __radd__ = __add__

    def __sub__(self, other: Term) -> Expression:
        return self._copy().plus(other, -1.0)

    def __rsub__(self, other: Term) -> Expression:
        return (-self).plus(other)

    def __neg__(self) -> Expression:
        return self * -1.0

    def __mul__(self, factor: float) -> Expression:
        terms = {column: factor * share for column, share in self.terms.items()}
        return _Combined(terms, factor * self.constant)

    __rmul__ = __mul__

    def __le__(self, other: Term) -> Row:
        less = self - other
        return Row(less.terms, -inf, -less.constant)

    def __ge__(self, other: Term) -> Row:
        less = self - other
        return Row(less.terms, -less.constant, inf)

    def __eq__(self, other: Term) -> Row:  # type: ignore[override]
        less = self - other
        return Row(less.terms, -less.constant, -less.constant)

    def at(self, values: Floats) -> float:
        """What it is where the columns have these values."""
        total = sum(share * values[column] for column, share in self.terms.items())
        return float(self.constant + total)


class _Combined(Expression):
    """What arithmetic makes.

    A `Column` is none of these: Python asks the right side first how it compares where that is of a
    special kind of the left, and the row would be written the other way round.
    """

    __slots__ = ()


Term: TypeAlias = "Expression | float"


def summed(items: Iterable[Term]) -> Expression:
    """The sum of all `items`, a new expression."""
    found = _Combined({})
    for item in items:
        found.plus(item)
    return found


class Column(Expression):
    """One unknown, between `low` and `high`; a whole number where it `is_whole`."""

    __slots__ = ("high", "is_whole", "low", "name", "number")

    def __init__(self, number: int, name: str, low: float, high: float, is_whole: bool) -> None:
        super().__init__({number: 1.0})
        self.number, self.name, self.is_whole = number, name, is_whole
        self.low, self.high = low, high


class Row:
    """A sum of columns between `low` and `high`."""

    __slots__ = ("high", "low", "terms")

    def __init__(self, terms: dict[int, float], low: float, high: float) -> None:
        self.terms, self.low, self.high = terms, low, high


@dataclass(frozen=True)
class Matrix:
    """A program as arrays: bounds and costs of columns, bounds of rows, and entries by rows.

    Of row r these are in [`start[r]`, `start[r + 1]`) of `index`, which has columns, and `value`.
    """

    offset: float
    col_cost: Floats
    col_lower: Floats
    col_upper: Floats
    row_lower: Floats
    row_upper: Floats
    start: Integers
    index: Integers
    value: Floats


class LinearProgram:
    """What is least, `objective`, of all columns that obey all `rows`."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.rows: list[Row] = []
        self.objective: Expression = _Combined({})

    def column(
        self, name: str, low: float = 0.0, high: float = inf, *, is_whole: bool = False
    ) -> Column:
        """A new column."""
        found = Column(len(self.columns), name, low, high, is_whole)
        self.columns.append(found)
        return found

    def choice(self, name: str, *, is_whole: bool = True) -> Column:
        """A new column for yes or no; or, if it need not be `is_whole`, for a share."""
        return self.column(name, 0.0, 1.0, is_whole=is_whole)

    def add(self, row: Row) -> None:
        """One more row to obey."""
        self.rows.append(row)

    @property
    def entries(self) -> int:
        """How many coefficients its rows have."""
        return sum(len(row.terms) for row in self.rows)

    @cached_property
    def matrix(self) -> Matrix:
        """All of it, when nothing more is added."""
        costs = np.zeros(len(self.columns))
        for column, cost in self.objective.terms.items():
            costs[column] = cost
        rows = self.rows
        shares = np.fromiter(
            chain.from_iterable(row.terms.values() for row in rows), np.float64, self.entries
        )
        index = np.fromiter(chain.from_iterable(row.terms for row in rows), np.int32, len(shares))
        ends = np.fromiter(_with_start(len(row.terms) for row in rows), np.int64, len(rows) + 1)
        there = shares != 0.0
        before = np.concatenate([[0], np.cumsum(there)])
        return Matrix(
            self.objective.constant,
            costs,
            _floats(column.low for column in self.columns),
            _floats(column.high for column in self.columns),
            _floats(row.low for row in rows),
            _floats(row.high for row in rows),
            before[ends].astype(np.int32),
            index[there],
            shares[there],
        )

    @cached_property
    def whole(self) -> tuple[Column, ...]:
        """The columns that are whole numbers."""
        return tuple(column for column in self.columns if column.is_whole)


def _with_start(lengths: Iterable[int]) -> Iterator[int]:
    return accumulate(lengths, initial=0)


def _floats(values: Iterable[float]) -> Any:
    return np.array([*values], dtype=np.float64)
