"""Rows: ops that are alike, one of each of several updates, as one call for all of their tensors.

In: the calls of updates that are alike one by one. Out: their rows, in order. What a row makes goes
to the next ones as the list that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import fx

from cotrain_compile.backends.eager.calls import COPY, Call, Column, Row
from cotrain_compile.runtime.list_ops import list_op


def rows_of(updates: Sequence[Sequence[Call]]) -> list[Row]:
    """The rows of `updates`."""
    place = {call.node: number for number, call in enumerate(updates[0])}
    inside = {call.node for calls in updates for call in calls}
    last = {place[n]: number for number, call in enumerate(updates[0]) for n in _own(call, place)}
    rows = []
    for number, calls in enumerate(zip(*updates, strict=True)):
        nodes = [call.node for call in calls]
        columns = zip(*(node.args for node in nodes), strict=True)
        rows.append(
            Row(
                nodes=nodes,
                compute=list_op(nodes),
                columns=[_column(values, place) for values in columns],
                copies=nodes[0].target is COPY,
                overwrites_input=calls[0].overwrites_input,
                writes=[write for call in calls for write in call.writes],
                kept=[(at, n) for at, n in enumerate(nodes) if not inside >= n.users.keys()],
                done_with=[row for row, at in last.items() if at == number],
            )
        )
    return rows


def _own(call: Call, place: dict[fx.Node, int]) -> list[fx.Node]:
    return [node for node in (call.node, *call.node.all_input_nodes) if node in place]


def _column(values: Sequence[Any], place: dict[fx.Node, int]) -> Column:
    first = values[0]
    if not isinstance(first, fx.Node):
        return lambda _, made: first
    if first in place:
        row = place[first]
        return lambda _, made: made[row]
    take = itemgetter(*values)
    return lambda given, _: take(given)
