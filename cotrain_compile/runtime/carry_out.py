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

from cotrain_compile.runtime.ops import Launch, Runtime
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
