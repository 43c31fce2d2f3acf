"""With views: steps with ops that do nothing but read, as views are, wherever they may stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, Op


def with_views(dataflow: Dataflow, places: Sequence[tuple[int, tuple[int, ...]]]) -> Dataflow:
    """`dataflow` with a view for each of `places`: before which op, and of which buffers.

    Both are numbers, modulo how many there are: of buffers those that are there by then. What is
    about its last use there is longer so. But for parameters no view is of what updates make, or
    have to themselves.
    """
    own = {name for group in dataflow.updates for name in (*group.states, *group.scalars)}
    of_updates = {name for group in dataflow.updates for name in group.ops}
    own |= {name for op in dataflow.ops if op.name in of_updates for name in op.writes}
    own -= {group.param for group in dataflow.updates}
    views: dict[int, list[Op]] = {}
    for number, (place, chosen) in enumerate(places):
        position = place % len(dataflow.ops)
        behind = dataflow.ops[position]
        made = {name for op in dataflow.ops[:position] for name in op.writes}
        there = [b.name for b in dataflow.buffers if b.is_input or b.name in made]
        there = [name for name in there if name not in own]
        reads = tuple(dict.fromkeys(there[each % len(there)] for each in chosen))
        view = Op(f"view_{number}", "aten.view.default", behind.phase, reads, ())
        views.setdefault(position, []).append(view)
    ops = [each for n, op in enumerate(dataflow.ops) for each in (*views.get(n, ()), op)]
    return replace(dataflow, ops=tuple(ops))
