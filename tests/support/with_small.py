"""With small: steps of which some parameters are biases, so small that nobody would move them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow

ITEM = 4  # bytes


def with_small(dataflow: Dataflow, params: Collection[str]) -> Dataflow:
    """`dataflow` in which what `params` and their updates have is a thousandth of what it was."""
    groups = [group for group in dataflow.updates if group.param in params]
    small = {name for g in groups for name in (g.param, *g.states, g.gradient, *g.recasts)}
    small |= {group.low_precision for group in groups}
    buffers = tuple(
        replace(b, nbytes=max(ITEM, b.nbytes // 1000)) if b.name in small else b
        for b in dataflow.buffers
    )
    return replace(dataflow, buffers=buffers)
