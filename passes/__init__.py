"""Passes: StepGraph and Plan in, StepGraph out. A pass decides nothing; every choice is the plan's.

`PASSES` is the whole list, in order. `run_passes` verifies after each and tells one observer.
"""

from __future__ import annotations

from collections.abc import Callable

from cotrain_compile.collector import collector_off
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.insert_transfers import insert_transfers
from cotrain_compile.passes.insert_waits import insert_waits
from cotrain_compile.passes.move_ops import move_ops
from cotrain_compile.passes.outline_host_regions import outline_host_regions
from cotrain_compile.passes.use_fetched_copies import use_fetched_copies
from cotrain_compile.plan import Plan

Pass = Callable[[StepGraph, Plan], StepGraph]
Observer = Callable[[str, StepGraph, StepGraph], None]

PASSES: tuple[Pass, ...] = (
    move_ops,
    outline_host_regions,
    insert_transfers,
    insert_waits,
    use_fetched_copies,
)


@collector_off()
def run_passes(step: StepGraph, plan: Plan, observer: Observer | None = None) -> StepGraph:
    """Apply `PASSES` to a copy of `step`.

    `observer(name, before, after)` is called after each pass; printing and diffing hang there. For
    it every pass rewrites a copy of its own; otherwise one copy does for all.
    """
    step = step.copy()
    for rewrite in PASSES:
        before, step = step, step.copy() if observer is not None else step
        step = rewrite(step, plan).verify()
        if observer is not None:
            observer(rewrite.__name__, before, step)
    return step
