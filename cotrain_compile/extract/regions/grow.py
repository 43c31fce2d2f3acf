"""Grow: the ops around a wide one that can run in parts with it.

From an op on, each op that reads rows of another and has a rule is one of the parts; what has none,
and all that follows from it, is not, so that nothing outside stands between two ops of the parts.
Of these stay what touches a wide value, half as wide as the first or wider, and what lies between.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cotrain_compile.extract.regions.rows import Rows
from cotrain_compile.extract.regions.rules import (
    COUNTED,
    SUM,
    Call,
    Counted,
    Result,
    Sum,
    outcome_of,
    shape_of,
)

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
# What these make hangs on the shape of their argument alone.
LIKE = frozenset({aten.ones_like.default, aten.zeros_like.default, aten.full_like.default})


@dataclass
class Grown:
    """Ops that run in parts of `length` rows, in their order.

    `rows` are where their values have them, `sums` the values that are shares of a sum, `counted`
    those that no part knows, `needs` the rows of values from outside. `results` has what an op with
    several makes of each, `unread` what looks at nothing but the shape of what follows from parts.
    """

    length: int
    ops: list[fx.Node] = field(default_factory=list)
    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    sums: set[fx.Node] = field(default_factory=set)
    counted: set[fx.Node] = field(default_factory=set)
    needs: dict[fx.Node, Rows] = field(default_factory=dict)
    results: dict[fx.Node, Sequence[Result]] = field(default_factory=dict)
    unread: set[fx.Node] = field(default_factory=set)

    def part_rows_of(self, node: fx.Node) -> Rows | None:
        """Where a part has its rows of `node`, from inside or outside; None where it has all."""
        return self.rows.get(node, self.needs.get(node))


def grow(nodes: Sequence[fx.Node], start: fx.Node, rows: Rows, length: int) -> Grown:
    """What runs in parts with `start`, whose result has `rows`; `nodes` are those behind it."""
    return _Growing(start, rows, length).run(nodes)


class _Growing:
    def __init__(self, start: fx.Node, rows: Rows, length: int) -> None:
        self.start, self.start_rows = start, rows
        self.found = Grown(length)
        # Of shifted tokens there are a few less.
        self.wide_from = _elements(start) / 2
        self.open: dict[fx.Node, Rows] = {}  # values that may be read in parts
        self.closed: set[fx.Node] = set()  # values that are there when all parts have run
        self.behind: set[fx.Node] = set()  # what follows from the parts, and is none of them

    def run(self, nodes: Sequence[fx.Node]) -> Grown:
        first = self._start()
        if not first:
            return self.found
        for node in nodes:
            if node.op == "call_function":
                self._visit(node)
        self._keep()
        return self.found

    def _start(self) -> bool:
        """The first op, by what its rows are where its argument has them there."""
        node = self.start
        source: Any = node.args[1 if node.target is aten.addmm.default else 0]
        given = Rows(self.start_rows.first, self.start_rows.last)
        outcome = outcome_of(Call(node, {source: given}, self.found.length))
        if outcome is None or outcome.made != self.start_rows:
            return False
        self._take(node, outcome.made, {**outcome.needs, source: given})
        return True

    def _visit(self, node: fx.Node) -> None:
        given = node.all_input_nodes
        late = any(n in self.behind or n in self.closed for n in given)
        if node.target in LIKE and (late or any(n in self.open for n in given)):
            self.found.unread.add(node)
        elif late:
            self.behind.add(node)
        elif node.target is operator.getitem and node.args[0] in self.found.results:
            self._take_item(node)
        elif any(n in self.open for n in given):
            rows = {n: self.open[n] for n in given if n in self.open}
            outcome = outcome_of(Call(node, rows, self.found.length))
            if outcome is None or not self._agrees(outcome.needs):
                self.behind.add(node)
            else:
                self._take(node, outcome.made, outcome.needs)

    def _agrees(self, needs: Any) -> bool:
        own = self.found.needs
        return all(own.get(node, rows) == rows for node, rows in needs.items())

    def _take(self, node: fx.Node, made: Any, needs: Any) -> None:
        self.found.ops.append(node)
        self.found.needs.update(needs)
        if isinstance(made, tuple):
            self.found.results[node] = made
        else:
            self._result(node, made)

    def _take_item(self, node: fx.Node) -> None:
        source, index = node.args
        made = self.found.results[source][index]  # type: ignore[index]
        if made is COUNTED:
            self.found.counted.add(node)
            return
        self.found.ops.append(node)
        self._result(node, made)

    def _result(self, node: fx.Node, made: Result) -> None:
        """What others may do with it: a sum is there when all parts have run, as what leaves is."""
        if isinstance(made, Rows):
            self.found.rows[node] = made
        elif isinstance(made, Sum):
            self.found.sums.add(node)
        assert not isinstance(made, Counted) and made is not None
        if made is SUM or (node.target in PRODUCTS and not self._is_wide(node)):
            self.closed.add(node)
        else:
            self.open[node] = made  # type: ignore[assignment]

    def _is_wide(self, node: fx.Node) -> bool:
        return node in self.found.rows and _elements(node) >= self.wide_from

    def _keep(self) -> None:
        kept = set[fx.Node]()
        for node in reversed(self.found.ops):
            touches = any(map(self._is_wide, (node, *node.all_input_nodes)))
            item = node.target is operator.getitem
            if (touches and not item) or any(user in kept for user in node.users):
                kept.add(node)
        kept |= {n for n in self.found.ops if n.target is operator.getitem and n.args[0] in kept}
        found = self.found
        found.ops = [node for node in found.ops if node in kept]
        found.rows = {node: rows for node, rows in found.rows.items() if node in kept}
        found.sums &= kept
        read = {n for node in found.ops for n in node.all_input_nodes}
        lost = {node for node in found.counted if node.args[0] not in kept}
        found.counted -= lost
        if not read.isdisjoint(lost):  # a part needs what comes behind the parts
            found.ops = []
        last = found.ops[-1] if found.ops else self.start
        found.unread = {node for node in found.unread if node < last}
        found.needs = {node: rows for node, rows in found.needs.items() if node in read}


def _elements(node: fx.Node) -> int:
    size = 1
    for length in shape_of(node):
        size *= int(length)
    return size
