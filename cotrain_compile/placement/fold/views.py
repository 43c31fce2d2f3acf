"""Views: the step without ops that do nothing.

In: a Dataflow. Out: one with fewer ops. Nearly half of the ops of forward and backward are views:
they make no buffer, take no time, and want on the device what they are views of. Those go whose
buffers the op before them or the one behind them touches anyway. Ops of updates are no such
neighbours: they may run elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, takewhile

from cotrain_compile.dataflow import Dataflow, Op, SizeExpressions
from cotrain_compile.placement.fold.folded import Folded
from cotrain_compile.placement.remembered import once


@once
def without_views(dataflow: Dataflow) -> Folded:
    """The step without views that tell a plan nothing; an op beside them stands for them.

    What one of a row needs that goes with the op before it is there beside what another needs that
    goes with the op behind, where that comes first. So those go with the one that begin the row,
    and with the other those that end it.
    """
    of_updates = {name for group in dataflow.updates for name in group.ops}

    def is_view(op: Op) -> bool:
        does_nothing = not (op.writes or op.flops or op.bytes_moved)
        is_of_exchange = op.collective is not None or bool(op.awaits)
        return does_nothing and not is_of_exchange and op.name not in of_updates

    def go_with(neighbour: Op | None, views: tuple[Op, ...]) -> int:
        """How many of `views`, the first ones, need nothing else than `neighbour` does."""
        if neighbour is None or neighbour.name in of_updates:
            return 0
        needed = dataflow.fixed.union(neighbour.touched)
        return len([*takewhile(lambda view: needed.issuperset(view.touched), views)])

    rows = [(are_views, tuple(row)) for are_views, row in groupby(dataflow.ops, key=is_view)]
    parts: dict[str, list[str]] = {}  # names
    for number, (are_views, row) in enumerate(rows):
        if not are_views:
            for op in row:
                parts.setdefault(op.name, []).append(op.name)
            continue
        before = rows[number - 1][1][-1] if number else None
        behind = rows[number + 1][1][0] if number + 1 < len(rows) else None
        first = go_with(before, row)
        last = len(row) - go_with(behind, row[first:][::-1])
        names = [view.name for view in row]
        if before is not None:
            parts[before.name] += names[:first]
        parts |= {name: [name] for name in names[first:last]}
        if behind is not None:
            parts[behind.name] = names[last:]
    ops = tuple(op for op in dataflow.ops if op.name in parts)
    left = replace(dataflow, ops=ops, expressions=SizeExpressions())
    return Folded(left, {name: tuple(of) for name, of in parts.items()})
