"""Views: the step without ops that do nothing.

In: a Dataflow. Out: one with fewer ops. Nearly half of the ops of forward and backward are views:
they make no buffer, take no time, and want on the device what they are views of. Those go whose
buffers the op before them or the one behind them touches anyway. Ops of updates are no such
neighbours: they may run elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from cotrain_compile.dataflow import Dataflow, Op, SizeExpressions
from cotrain_compile.placement.fold.folded import Folded
from cotrain_compile.placement.remembered import once


@once
def without_views(dataflow: Dataflow) -> Folded:
    """The step without views that tell a plan nothing; an op beside them stands for them."""
    of_updates = {name for group in dataflow.updates for name in group.ops}

    def is_view(op: Op) -> bool:
        does_nothing = not (op.writes or op.flops or op.bytes_moved)
        is_of_exchange = op.collective is not None or bool(op.awaits)
        return does_nothing and not is_of_exchange and op.name not in of_updates

    folding = _Folding(dataflow, of_updates)
    for are_views, run in groupby(dataflow.ops, key=is_view):
        folding.add(tuple(run), are_views=are_views)
    folding.add((), are_views=False)
    ops, parts = tuple(folding.ops), {op: tuple(of) for op, of in folding.parts.items()}
    return Folded(replace(dataflow, ops=ops, expressions=SizeExpressions()), parts)


class _Folding:
    """A step that is made anew, a row of ops after the other; views wait for what is behind."""

    def __init__(self, dataflow: Dataflow, of_updates: set[str]) -> None:
        self.fixed, self.of_updates = dataflow.fixed, of_updates
        self.ops: list[Op] = []
        self.parts: dict[str, list[str]] = {}
        self.views: tuple[Op, ...] = ()

    def add(self, run: Sequence[Op], *, are_views: bool) -> None:
        """Add the next ops in a row."""
        if are_views:
            self.views = tuple(run)
            return
        behind = self._without_neighbours(run[0] if run and self._is_neighbour(run[0]) else None)
        self._keep(run)
        if run:
            self.parts[run[0].name][:0] = behind
        self.views = ()

    def _without_neighbours(self, behind: Op | None) -> list[str]:
        """Keep of the views in a row those that tell something.

        What one that goes with the op before it needs is needed with what others need that go with
        the op `behind`, where these come first: so those that begin the row go with the one, and
        those that end it with the other. Returns the names of the last ones.
        """
        views, first, last = self.views, 0, len(self.views)
        before = self.ops[-1] if self.ops and self._is_neighbour(self.ops[-1]) else None
        needed = self.fixed.union(before.touched if before else ())
        while before and first < last and needed.issuperset(views[first].touched):
            self.parts[before.name].append(views[first].name)
            first += 1
        needed = self.fixed.union(behind.touched if behind else ())
        while behind and last > first and needed.issuperset(views[last - 1].touched):
            last -= 1
        self._keep(views[first:last])
        return [view.name for view in views[last:]]

    def _is_neighbour(self, op: Op) -> bool:
        return op.name not in self.of_updates

    def _keep(self, ops: Sequence[Op]) -> None:
        self.ops += ops
        self.parts.update((op.name, [op.name]) for op in ops)
