"""Bars: those of a panel merged by layer.

A step of 15,000 ops has more bars than a screen has pixels. What runs one after the other on a
lane, in one layer and of one kind, is one bar until the reader zooms in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotrain_compile.viz.specification import Bar

# Bars of one layer with less than this part of the step between them are merged.
JOINED = 1 / 1000


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
                nbytes=last.nbytes + bar.nbytes,
            )
        else:
            result.append(bar)
    return tuple(result)


def _alike(one: Bar, other: Bar) -> bool:
    return (one.lane, one.layer, one.kind) == (other.lane, other.layer, other.kind)
