"""Bars: the spans of a timeline as rows for a chart, and the same merged by layer.

A step of 15,000 ops has more bars than a screen has pixels. What runs one after the other on a
lane, in one layer and of one kind, is one bar until the reader zooms in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.viz.kinds import kinds_of, spans_with_kinds
from cotrain_compile.viz.layers import REST, layers

# Bars of one layer with less than this part of the step between them are merged.
JOINED = 1 / 1000


@dataclass(frozen=True)
class Bar:
    """`count` spans of a lane from `start_s` to `end_s`, of which `busy_s` are work.

    `kind` is a key of `timeline.COLOURS`; `what` says more about a single span: its operation.
    """

    lane: str
    name: str
    kind: str
    layer: str
    what: str
    start_s: float
    end_s: float
    busy_s: float
    count: int = 1


def bars_of(
    timeline: Timeline, plan: Plan, dataflow: Dataflow, zero_s: float | None = None
) -> tuple[Bar, ...]:
    """One bar for each span, in the order of lanes and time.

    Times count from `zero_s`, or else from the start of the first span.
    """
    if zero_s is None:
        zero_s = min((span.start_s for span in timeline.spans), default=0.0)
    kinds = kinds_of(plan, {op.name: op.phase for op in dataflow.ops})
    found = layers(dataflow)
    of_layer = {**found.of_op, **found.of_tasks(plan)}
    what = _what(plan, dataflow)
    bars = [
        Bar(
            lane=str(span.lane),
            name=span.name,
            kind=kind,
            layer=of_layer.get(span.name, REST),
            what=what.get(span.name, ""),
            start_s=span.start_s - zero_s,
            end_s=span.end_s - zero_s,
            busy_s=span.end_s - span.start_s,
        )
        for span, kind in spans_with_kinds(timeline, kinds)
    ]
    return tuple(sorted(bars, key=lambda bar: (bar.lane, bar.start_s)))


def merged(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    """`bars`, those of one lane, layer and kind that all but touch made one."""
    gap_s = JOINED * max((bar.end_s for bar in bars), default=0.0)
    result: list[Bar] = []
    for bar in bars:
        last = result[-1] if result else None
        if last is not None and _alike(last, bar) and bar.start_s - last.end_s <= gap_s:
            result[-1] = replace(
                last,
                end_s=max(last.end_s, bar.end_s),
                busy_s=last.busy_s + bar.busy_s,
                count=last.count + bar.count,
            )
        else:
            result.append(bar)
    return tuple(result)


def kinds_in(bars: Iterable[Bar]) -> set[str]:
    """The kinds of work that occur."""
    return {bar.kind for bar in bars}


def _alike(one: Bar, other: Bar) -> bool:
    return (one.lane, one.layer, one.kind) == (other.lane, other.layer, other.kind)


def _what(plan: Plan, dataflow: Dataflow) -> Mapping[str, str]:
    """The operation of an op, the buffer of a copy, the parameter of an update."""
    operations = {op.name: op.target for op in dataflow.ops}
    copies = {task.name: task.buffer for task in plan.transfers}
    return {**operations, **copies, **{task.name: task.param for task in plan.host_regions}}
