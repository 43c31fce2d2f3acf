"""Casts once: the step in which the low-precision copy of each parameter is made once.

In: a Dataflow. Out: the same where what autocast casts again, for another micro-batch or in a
checkpoint's second forward, is the first copy, which is the same to the bit: nothing writes the
parameter in between. A parameter at home on the host then crosses the link in low precision, where
it had to come whole for the other casts. Its copy lives longer for that, where it is not fetched
for each use. The pass `cast_once` does the same to the graph.
"""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, UpdateGroup
from cotrain_compile.placement.remembered import once


def has_recasts(dataflow: Dataflow) -> bool:
    """Whether a parameter of the step is cast more than once."""
    return any(group.recasts for group in dataflow.updates)


def casts_once(dataflow: Dataflow) -> Dataflow:
    """The step with one copy of each parameter: the one that is made first."""
    return _rewritten(dataflow) if has_recasts(dataflow) else dataflow


@once
def _rewritten(dataflow: Dataflow) -> Dataflow:
    made_at: dict[str, int] = {}
    for position, op in enumerate(dataflow.ops):
        for name in op.writes:
            made_at.setdefault(name, position)
    instead: dict[str, str] = {}
    updates: list[UpdateGroup] = []
    for group in dataflow.updates:
        copies = [name for name in (group.low_precision, *group.recasts) if name in made_at]
        first = min(copies, key=made_at.__getitem__, default="")
        instead |= {name: first for name in copies if name != first}
        updates.append(replace(group, low_precision=first, recasts=()))
    gone = {dataflow.ops[made_at[name]].name for name in instead}
    ops = tuple(
        replace(op, reads=tuple(dict.fromkeys(instead.get(name, name) for name in op.reads)))
        if not instead.keys().isdisjoint(op.reads)
        else op
        for op in dataflow.ops
        if op.name not in gone
    )
    marked = dataflow.checkpoints
    # What a kernel takes while it runs goes with its op.
    lost = {name for op in dataflow.ops if op.name in gone for name in op.writes}
    return replace(
        dataflow,
        ops=ops,
        buffers=tuple(b for b in dataflow.buffers if b.name not in lost),
        updates=tuple(updates),
        checkpoints=replace(marked, values=tuple(v for v in marked.values if v not in lost)),
        regions=(),
    )
