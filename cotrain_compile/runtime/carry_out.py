"""Carry out: what starts or awaits the task of a node on a runtime, looked up once for all steps.

In: a node of a placed graph. Out: a function of a runtime and the values of nodes. It does as the
op does by way of torch's dispatcher, at a small part of its price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, assert_never

import torch
from torch import fx

from cotrain_compile.runtime.ops import Bundle, Launch, Runtime, name_of_bundle
from cotrain_compile.runtime.task_nodes import (
    HostCast,
    Offload,
    Prefetch,
    RegionCall,
    TaskNode,
    Wait,
    WaitPrevious,
    view_of,
)

# A copy of so many bytes takes as long as a thread that is woken up for it.
SMALL_BYTES = 64 << 10

Value = Callable[[fx.Node], Any]
Carry = Callable[[Runtime, Value], Any]


def carrying_out(node: fx.Node, view: TaskNode, *, alongside: bool) -> Carry:
    """What carries out `node`, whose view is `view`; `alongside` is as of `Launch`."""
    match view:
        case Wait(tasks):
            awaited = _awaited_from(node, tasks)
            return lambda runtime, value: runtime.wait(awaited)
        case WaitPrevious(tasks):
            awaited = list(tasks)
            return lambda runtime, value: runtime.wait_previous(awaited)
        case RegionCall(region, inputs, launch):
            return _region_launch(region, inputs, replace(launch, small=_is_small(node)))
        case HostCast(source, dtype, launch):
            launch = replace(launch, small=_is_small(node))
            return lambda runtime, value: runtime.host_cast(value(source), dtype, launch)
        case Offload():
            return _offload(view, _launch(node, view, alongside))
        case Prefetch():
            return _prefetch(view, _launch(node, view, alongside))
        case _:
            assert_never(view)


def carrying_out_together(
    nodes: Sequence[fx.Node], views: Sequence[TaskNode], *, alongside: bool
) -> Carry:
    """What carries out `nodes`, which are a bundle, as one task; it returns their values."""
    match views[0]:
        case Offload() | Prefetch():
            return _copies(nodes, views, alongside)
        case RegionCall():
            calls = [view for view in views if isinstance(view, RegionCall)]
            together = bundle_of(
                [replace(v.launch, small=_is_small(n)) for n, v in zip(nodes, calls, strict=True)]
            )
            return _region_launches(calls, together)
        case _:
            raise AssertionError(f"{nodes[0]} is of a kind that comes in no bundles")


def bundle_of(members: Sequence[Launch]) -> Bundle:
    """All `members` at once: as small as the largest of them, after all that they come after."""
    launch = Launch(
        name_of_bundle(members),
        tuple(dict.fromkeys(name for member in members for name in member.after)),
        tuple(dict.fromkeys(name for member in members for name in member.after_previous)),
        members[0].bundle,
        alongside=members[0].alongside,
        small=all(member.small for member in members),
    )
    return Bundle(launch, members)


def _copies(nodes: Sequence[fx.Node], views: Sequence[TaskNode], alongside: bool) -> Carry:
    copies = [view for view in views if isinstance(view, Offload | Prefetch)]
    launches = [
        _launch(node, view, alongside or number > 0)
        for number, (node, view) in enumerate(zip(nodes, copies, strict=True))
    ]
    together, sources = bundle_of(launches), [view.source for view in copies]
    over = [view.destination for view in copies if view.destination is not None]
    down, nothing = isinstance(copies[0], Offload), [None] * len(copies)
    if not over:
        return lambda runtime, value: runtime.copy_all([*map(value, sources)], together, down=down)

    def copy(runtime: Runtime, value: Value) -> Any:
        runtime.copy_all_into([*map(value, over)], [*map(value, sources)], together, down=down)
        return nothing

    return copy


def _region_launches(calls: Sequence[RegionCall], together: Bundle) -> Carry:
    regions, nothing = [call.region for call in calls], [None] * len(calls)

    def launch_regions(runtime: Runtime, value: Value) -> Any:
        given = [[value(v) if isinstance(v, fx.Node) else v for v in call.inputs] for call in calls]
        runtime.run_regions([*map(value, regions)], given, together)
        return nothing

    return launch_regions


def _launch(node: fx.Node, view: Offload | Prefetch, alongside: bool) -> Launch:
    is_followed_by_one_alike = type(view_of(node.next)) is type(view)
    return replace(
        view.launch, alongside=alongside, more=is_followed_by_one_alike, small=_is_small(node)
    )


def _awaited_from(node: fx.Node, own: Sequence[str]) -> list[str]:
    """What `node` waits for: the first of waits side by side for all, others for their own tasks.

    So all that is held for them begins together, and each task is waited for once or twice.
    """
    if isinstance(view_of(node.prev), Wait):
        return [*own]
    awaited: list[str] = []
    while isinstance(view := view_of(node), Wait):
        awaited += view.tasks
        node = node.next
    return awaited


def _is_small(node: fx.Node) -> bool:
    """Whether all that the task of `node` reads and writes is small."""
    values = [value.meta.get("val") for value in node.all_input_nodes]
    sizes = [v.numel() * v.itemsize for v in values if isinstance(v, torch.Tensor)]
    return all(isinstance(size, int) and size <= SMALL_BYTES for size in sizes)


def _offload(view: Offload, launch: Launch) -> Carry:
    source, over = view.source, view.destination
    if over is None:
        return lambda runtime, value: runtime.offload(value(source), launch)
    return lambda runtime, value: runtime.offload_into(value(over), value(source), launch)


def _prefetch(view: Prefetch, launch: Launch) -> Carry:
    source, over = view.source, view.destination
    if over is None:
        return lambda runtime, value: runtime.prefetch(value(source), launch)
    return lambda runtime, value: runtime.prefetch_into(value(over), value(source), launch)


def _region_launch(region: fx.Node, inputs: Sequence[Any], launch: Launch) -> Carry:
    def launch_region(runtime: Runtime, value: Value) -> None:
        given = [value(v) if isinstance(v, fx.Node) else v for v in inputs]
        runtime.run_region(value(region), given, launch)

    return launch_region
