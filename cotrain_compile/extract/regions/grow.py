"""Grow: the ops around a wide one that can run in parts with it.

From a product on, each op that reads rows of another and has a rule is one of the parts; what has
none, and all that follows from it, is not, so that nothing outside stands between two of the parts.
Of these stay what touches a wide value and what lies between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.extract.regions.calls import (
    COUNTED,
    SUM,
    CountedRows,
    Own,
    PartCall,
    PartResult,
    Result,
    Sum,
    shape_of,
)
from cotrain_compile.extract.regions.rows import Rows, viewed_rows
from cotrain_compile.extract.regions.rules import outcome_of
from cotrain_compile.extract.regions.starts import is_product

aten = torch.ops.aten
# What these make hangs on the shape of their argument alone.
LIKE = frozenset({aten.ones_like.default, aten.zeros_like.default, aten.full_like.default})


# What only moves or converts what it reads, on the way from a product to who reads it.
_THROUGH = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._to_copy.default}
)


@dataclass
class Grown:
    """Ops that run in parts of `length` rows, in their order, by the place where they do.

    `rows` are where their values have them, `sums` the values that are shares of a sum, `counted`
    those that no part knows, `own` those that each has in full, `needs` the rows of values from
    outside, `ends` those that say where groups of rows end. `results` has what an op with several
    makes of each, `unread` what looks at nothing but the shape of what follows from parts.
    """

    length: int
    windows: tuple[Sequence[fx.Node], ...] = ()
    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    sums: set[fx.Node] = field(default_factory=set)
    counted: set[fx.Node] = field(default_factory=set)
    own: set[fx.Node] = field(default_factory=set)
    needs: dict[fx.Node, Rows] = field(default_factory=dict)
    ends: set[fx.Node] = field(default_factory=set)
    results: dict[fx.Node, Sequence[Result]] = field(default_factory=dict)
    unread: set[fx.Node] = field(default_factory=set)

    @property
    def ops(self) -> Sequence[fx.Node]:
        """Those of all windows."""
        return [node for window in self.windows for node in window]

    def part_rows_of(self, node: fx.Node) -> Rows | None:
        """Where a part has its rows of `node`, from inside or outside; None where it has all."""
        return self.rows.get(node, self.needs.get(node))

    def copy(self) -> Grown:
        """The same, to be grown on."""
        return Grown(
            self.length,
            self.windows,
            dict(self.rows),
            set(self.sums),
            set(self.counted),
            set(self.own),
            dict(self.needs),
            set(self.ends),
            dict(self.results),
            set(self.unread),
        )


Starts = Mapping[fx.Node, Rows]
IsWide = Callable[[fx.Node], bool]


def grow(nodes: Sequence[fx.Node], starts: Starts, is_wide: IsWide, before: Grown) -> Grown:
    """`before` with a window more, of `nodes` in their order.

    It begins at the products `starts`, whose results have these rows, and at what reads rows that
    are there from the windows before. A product whose wide result a part needs starts with them.
    """
    among = frozenset(nodes)
    while True:
        found = _Growing(starts, is_wide, before).run(nodes)
        more = {
            product: rows
            for node, needed in found.needs.items()
            for product, rows in _made_by(node, needed, found.length, is_wide)
            if product in among and product not in starts
        }
        if not more:
            return found
        starts = {**starts, **more}


def _made_by(
    node: fx.Node, rows: Rows | None, length: int, is_wide: IsWide
) -> Iterator[tuple[fx.Node, Rows]]:
    """The product that makes a wide value from outside, with its rows."""
    while rows is not None and is_wide(node):
        if is_product(node):
            yield node, rows
            return
        if node.target not in _THROUGH:
            return
        source: Any = node.args[0]
        rows, node = viewed_rows(rows, shape_of(node), shape_of(source), length), source


class _Growing:
    def __init__(self, starts: Starts, is_wide: IsWide, before: Grown) -> None:
        self.starts, self.is_wide = starts, is_wide
        self.found = before.copy()
        self.own: list[fx.Node] = []
        # Values that may be read in parts.
        self.open = {n: rows for n, rows in before.rows.items() if not _is_exit(n, is_wide)}
        self.closed: set[fx.Node] = set()  # values that are there when all parts have run
        self.leaving: set[fx.Node] = set()  # rows among these that others read, and sums of those
        self.behind: set[fx.Node] = set()  # what follows from the parts, and is none of them

    def run(self, nodes: Sequence[fx.Node]) -> Grown:
        for node in nodes:
            if node.op == "call_function":
                self._visit(node)
        self._keep()
        self.found.windows = (*self.found.windows, self.own)
        return self.found

    def _start(self, node: fx.Node) -> bool:
        """Whether a product runs in parts: by the argument whose rows are those of its result."""
        for source in node.all_input_nodes:
            for dim in range(len(shape_of(source))):
                own = {source: Rows(dim, dim)}
                outcome = outcome_of(PartCall(node, own, self.found.length))
                if outcome is not None and outcome.made == self.starts[node]:
                    needs = {**outcome.needs, **own}
                    if self._agrees(needs):
                        self._take(node, outcome, needs)
                        return True
        return False

    def _visit(self, node: fx.Node) -> None:
        given = node.all_input_nodes
        if self._join(node):
            return
        late = any(n in self.behind or n in self.closed for n in given)
        if node.target in LIKE and late:
            self.found.unread.add(node)
        elif late:
            self.behind.add(node)
        elif node in self.starts and not any(n in self.open for n in given) and self._start(node):
            pass
        elif node.target is operator.getitem and node.args[0] in self.found.results:
            self._take_item(node)
        elif any(n in self.open for n in given):
            rows = {n: self.open[n] for n in given if n in self.open}
            outcome = outcome_of(PartCall(node, rows, self.found.length))
            if outcome is None or not self._agrees(outcome.needs):
                self.behind.add(node)
            else:
                self._take(node, outcome, outcome.needs)

    def _join(self, node: fx.Node) -> bool:
        """Add up what leaves, or what leads there: one value is then there when all have run."""
        given = node.all_input_nodes
        joins = node.target is aten.add.Tensor or node.target in _THROUGH or is_view(node)
        if not (joins and given and self.leaving.issuperset(given)):
            return False
        rows = {n: self.found.rows[n] for n in given}
        outcome = outcome_of(PartCall(node, rows, self.found.length))
        if outcome is None or not isinstance(outcome.made, Rows):
            return False
        self._take(node, outcome, outcome.needs)
        return True

    def _agrees(self, needs: Any) -> bool:
        own = self.found.needs
        return all(own.get(node, rows) == rows for node, rows in needs.items())

    def _take(self, node: fx.Node, outcome: PartResult, needs: Mapping[fx.Node, Rows]) -> None:
        self.own.append(node)
        self.found.needs.update(needs)
        self.found.ends.update(outcome.ends)
        if isinstance(outcome.made, tuple):
            self.found.results[node] = outcome.made
        else:
            self._result(node, outcome.made)

    def _take_item(self, node: fx.Node) -> None:
        source, index = node.args
        made = self.found.results[source][index]  # type: ignore[index]
        if made is COUNTED:
            self.found.counted.add(node)
            return
        self.own.append(node)
        self._result(node, made)

    def _result(self, node: fx.Node, made: Result) -> None:
        """What others may do with it: a sum is there when all parts have run, as what leaves is."""
        if isinstance(made, Rows):
            self.found.rows[node] = made
        elif isinstance(made, Sum):
            self.found.sums.add(node)
        elif isinstance(made, Own):
            self.found.own.add(node)
            return
        assert not isinstance(made, CountedRows) and made is not None
        if made is SUM:
            self.closed.add(node)
        elif _is_exit(node, self.is_wide) or self.leaving.issuperset(node.all_input_nodes):
            self.closed.add(node)
            self.leaving.add(node)
        else:
            self.open[node] = made  # type: ignore[assignment]

    def _is_wide_row(self, node: fx.Node) -> bool:
        return node in self.found.rows and self.is_wide(node)

    def _keep(self) -> None:
        """Leave out what touches no wide value and is between none that do."""
        kept = set[fx.Node]()
        for node in reversed(self.own):
            touches = any(map(self._is_wide_row, (node, *node.all_input_nodes)))
            item = node.target is operator.getitem
            joined = node in self.leaving and node.target is aten.add.Tensor
            if (touches and not item) or joined or any(user in kept for user in node.users):
                kept.add(node)
        kept |= {n for n in self.own if n.target is operator.getitem and n.args[0] in kept}
        lost = set(self.own) - kept
        found, self.own = self.found, [node for node in self.own if node in kept]
        read = {n for node in (*found.ops, *self.own) for n in node.all_input_nodes}
        uncounted = {node for node in found.counted if node.args[0] in lost}
        if not read.isdisjoint(uncounted):  # a part needs what comes behind the parts
            self.own = []
        found.counted -= uncounted
        found.sums -= lost
        found.own -= lost
        for node in lost:
            found.rows.pop(node, None)
            found.results.pop(node, None)
        last = self.own[-1] if self.own else None
        found.unread = {node for node in found.unread if last is not None and node < last}
        found.needs = {node: rows for node, rows in found.needs.items() if node in read}
        found.ends &= read


def _is_exit(node: fx.Node, is_wide: IsWide) -> bool:
    """Whether it is a product with a narrow result, behind which parts end."""
    return is_product(node) and not is_wide(node)


def leaves(node: fx.Node, grown: Grown) -> bool:
    """Whether the rest of the step reads the value of `node`, itself or a view of it."""
    inside = set(grown.ops)
    return any(user not in inside or (is_view(user) and leaves(user, grown)) for user in node.users)
