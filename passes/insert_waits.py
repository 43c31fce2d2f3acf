"""Insert the waits: the device goes on only when these tasks are done.

    cotrain.wait(['offload.g'], [])
    cotrain.wait_previous(['update.w'])         for deferred tasks of the step before

In a gap, offloads are waited for before anything is fetched there, all else after it. What a wait
keeps alive is filled in by `use_fetched_copies`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.gaps import Gaps
from cotrain_compile.plan import Plan, Task
from cotrain_compile.runtime.task_nodes import Prefetch, Wait, WaitPrevious, insert, view_of


def insert_waits(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph with the waits for tasks of `plan` in the gaps before ops."""
    gaps = Gaps(step)
    waits: dict[fx.Node, list[Task]] = {}
    for task in plan.tasks:
        if not task.deferred:
            waits.setdefault(gaps.before(task.wait_before), []).append(task)
    for gap, tasks in waits.items():
        offloads = [task for task in tasks if task.is_offload]
        _insert_wait(_first_fetch(gap), offloads)
        _insert_wait(gap, [task for task in tasks if not task.is_offload])
    _wait_for_the_step_before(gaps, plan)
    step.module.recompile()
    return step


def _wait_for_the_step_before(gaps: Gaps, plan: Plan) -> None:
    """In this step as in the next, which runs the same graph."""
    waits: dict[fx.Node, list[str]] = {}
    for task in plan.deferred:
        waits.setdefault(gaps.before(task.wait_before), []).append(task.name)
    for gap, names in waits.items():
        with gap.graph.inserting_before(gap):
            insert(gap.graph, WaitPrevious(names))


def _first_fetch(gap: fx.Node) -> fx.Node:
    """The first of the prefetches right before `gap` that take memory, or `gap` itself."""
    while _takes_memory(gap.prev):
        gap = gap.prev
    return gap


def _takes_memory(node: fx.Node) -> bool:
    view = view_of(node)
    return isinstance(view, Prefetch) and view.destination is None


def _insert_wait(place: fx.Node, tasks: Sequence[Task]) -> None:
    if tasks:
        with place.graph.inserting_before(place):
            insert(place.graph, Wait([task.name for task in tasks]))
