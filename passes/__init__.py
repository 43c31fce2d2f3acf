"""Passes: StepGraph and Plan in, StepGraph out. A pass decides nothing; every choice is the plan's.

`PASSES` is the whole list, in order. `run_passes` verifies what they make, and that random ops are
in their order, and tells one observer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from cotrain_compile.errors import PlanError
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.graph.random_ops import is_random
from cotrain_compile.passes.cast_once import cast_once
from cotrain_compile.passes.insert_transfers import insert_transfers
from cotrain_compile.passes.insert_waits import insert_waits
from cotrain_compile.passes.move_ops import move_ops
from cotrain_compile.passes.outline_host_regions import outline_host_regions
from cotrain_compile.passes.recompute_values import recompute_values
from cotrain_compile.passes.run_by_layer import run_by_layer
from cotrain_compile.passes.split_ops import split_ops
from cotrain_compile.passes.update_in_pieces import update_in_pieces
from cotrain_compile.passes.use_fetched_copies import use_fetched_copies
from cotrain_compile.placement.recompute.rewrite import again_name
from cotrain_compile.plan import Plan
from cotrain_compile.support.collector import collector_off
from cotrain_compile.support.raised_by_handler import raised_by_handler

Pass = Callable[[StepGraph, Plan], StepGraph]
Observer = Callable[[str, StepGraph, StepGraph], None]

PASSES: tuple[Pass, ...] = (
    split_ops,
    cast_once,
    run_by_layer,
    recompute_values,
    update_in_pieces,
    move_ops,
    outline_host_regions,
    insert_transfers,
    insert_waits,
    use_fetched_copies,
)


@collector_off()
def run_passes(step: StepGraph, plan: Plan, observer: Observer | None = None) -> StepGraph:
    """Apply `PASSES` to a copy of `step`.

    The result is verified, and that random ops and collectives are in their order. Where that, or a
    pass, fails, the passes run again and each is verified, so that the error is of the first that
    is at fault. `observer(name, before, after)` is called after each pass; printing and diffing
    hang there. For it every pass rewrites a copy of its own, and each is verified.
    """
    if observer is None:
        try:
            return _rewritten(step.copy(), plan)
        except Exception as error:
            if raised_by_handler(error) is not None:
                raise
    ordered = _ordered_ops(step)
    step = step.copy()
    for rewrite in PASSES:
        before, step = step, step.copy()
        step = rewrite(step, plan).verify()
        ordered = _in_order(step, ordered, rewrite)
        if observer is not None:
            observer(rewrite.__name__, before, step)
    return step


def _rewritten(step: StepGraph, plan: Plan) -> StepGraph:
    """`step`, changed in place by all passes and verified once."""
    ordered = _ordered_ops(step)
    for rewrite in PASSES:
        step = rewrite(step, plan)
        if rewrite is recompute_values:  # the one pass behind which there may be more of them
            ordered = _in_order(step, ordered, rewrite)
    _in_order(step.verify(), ordered, PASSES[-1])
    return step


def _in_order(step: StepGraph, ordered: list[str], rewrite: Pass) -> list[str]:
    """The random ops and collectives behind `rewrite`, if those there were are where they were."""
    again = _gathered_again(step, ordered) if rewrite is recompute_values else frozenset()
    found = _ordered_ops(step)
    _check_order(ordered, [name for name in found if name not in again], rewrite.__name__)
    return found


def _ordered_ops(step: StepGraph) -> list[str]:
    return [node.name for node in step.nodes if is_random(node) or is_collective(node)]


def _gathered_again(step: StepGraph, ordered: list[str]) -> frozenset[str]:
    """The gathers that a plan has run again; all ranks have that plan."""
    copies = set(map(again_name, ordered))
    return frozenset(n.name for n in step.nodes if is_collective(n) and n.name in copies)


def _check_order(ordered: list[str], found: list[str], rewrite: str) -> None:
    """Random ops and collectives are where they were, one behind the other.

    A random op elsewhere would draw other numbers, a collective meet another one of other ranks.
    """
    for before, after in zip_longest(ordered, found):
        if before != after:
            raise PlanError(
                f"{rewrite} puts random op or collective {after} where the step has {before}, so "
                "that both would draw other numbers or meet others of other ranks; make a new "
                "plan, and report this with the plan's file"
            )
