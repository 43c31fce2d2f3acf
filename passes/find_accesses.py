"""Accesses: what the nodes of a placed graph read and write, for `analysis.races`.

In: a step graph with tasks. Out: its `StepEvent`s in the order of its nodes, and the buffers that
persist. A buffer here is memory on one tier, under the name of the node that makes it: a copy on
the other tier is a buffer of its own, a view is none.

Memory that the device makes in the step is freed, and may be used again, right after the last node
that has it; nothing else holds it while a copy reads it. Memory on the host is held by what uses
it, so that freeing it needs no order. A random generator is a buffer, too, which ops that draw from
it read and write.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import assert_never

import torch
from torch import fx

from cotrain_compile.analysis.races import Race, StepEvent, find_race
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.graph.collectives import group_name_of, is_collective, is_wait
from cotrain_compile.graph.random_ops import generators_in, generators_of
from cotrain_compile.machine import Tier
from cotrain_compile.passes.views import base_of, is_write, viewed
from cotrain_compile.plan import Lane
from cotrain_compile.runtime.task_nodes import (
    HostCast,
    Offload,
    Prefetch,
    RegionCall,
    TaskNode,
    TaskStart,
    Wait,
    WaitPrevious,
    view_of,
)


def find_race_in(placed: StepGraph) -> Race | None:
    """The first race of a placed step that runs again and again, None where there is none."""
    lasting = _in_parts(_outliving(placed), _parts(placed, _buffer_names(placed)))
    return find_race(list(find_accesses(placed)), {*lasting})


def find_accesses(placed: StepGraph) -> Iterator[StepEvent]:
    """What happens in a placed step, in the order of its nodes."""
    names = _buffer_names(placed)
    freed = _freed_after(placed, names)
    parts = _parts(placed, names)
    for event in _whole_events(placed, names, freed):
        yield replace(
            event, reads=_in_parts(event.reads, parts), writes=_in_parts(event.writes, parts)
        )


def _whole_events(
    placed: StepGraph, names: Mapping[fx.Node, str], freed: Mapping[fx.Node, tuple[str, ...]]
) -> Iterator[StepEvent]:
    """The same; who touches all of what others touch in parts names the whole."""
    for node in placed.nodes:
        if node.op == "output":
            yield StepEvent(
                "what the step returns", Lane.DEVICE, _named(node.all_input_nodes, names)
            )
        elif node.op == "call_function":
            yield from _events_of(node, placed, names)
        if node in freed:
            yield StepEvent(f"freeing memory after {node.name}", Lane.DEVICE, writes=freed[node])
    yield StepEvent("the end of the step", Lane.DEVICE, writes=_outliving(placed), ends_step=True)


def _outliving(placed: StepGraph) -> tuple[str, ...]:
    """What is the user's between two steps: inputs, and the generators that are drawn from."""
    inputs = (item.name for item in placed.inputs)
    drawn = _generators(generators_in(placed.module.graph))
    return (*inputs, *drawn, *_groups(placed.nodes))


def _parts(placed: StepGraph, names: Mapping[fx.Node, str]) -> dict[str, tuple[str, ...]]:
    """The parts of what is on the host that tasks read or write, by the whole."""
    found: dict[str, dict[str, None]] = {}
    for node in placed.nodes:
        view = view_of(node)
        if isinstance(view, Offload | Prefetch) and view.launch.part:
            whole = names[_on_host(view)]
            found.setdefault(whole, {})[_part_name(whole, view)] = None
    return {whole: tuple(parts) for whole, parts in found.items()}


def _on_host(view: Offload | Prefetch) -> fx.Node:
    if isinstance(view, Prefetch):
        return view.source
    assert view.destination is not None, "a part of what is on the host is copied over"
    return view.destination


def _part_name(whole: str, view: Offload | Prefetch) -> str:
    begin, end = view.launch.part
    return f"{whole}[{begin}:{end}]"


def _in_parts(buffers: Iterable[str], parts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(part for name in buffers for part in parts.get(name, (name,)))


def _generators(devices: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"generator.{device}" for device in devices)


def _groups(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The order of exchanges in each process group of collectives, each once."""
    return tuple({f"group.{group_name_of(n)}": None for n in nodes if is_collective(n)})


def _events_of(
    node: fx.Node, placed: StepGraph, names: Mapping[fx.Node, str]
) -> Iterator[StepEvent]:
    view = view_of(node)
    match view:
        case Wait(tasks):
            yield StepEvent(node.name, Lane.DEVICE, after=tuple(tasks))
        case WaitPrevious(tasks):
            yield StepEvent(node.name, Lane.DEVICE, after_previous=tuple(tasks))
        case Offload() | Prefetch() | HostCast() | RegionCall():
            made = (names[node],) if _memory_on(view) is not None else ()
            yield StepEvent(f"the issue of {view.launch.task}", Lane.DEVICE, writes=made)
            yield _task(node, view, placed, names)
        case None:
            if _computes(node):
                yield _op(node, names)
        case _:
            assert_never(view)


def _op(node: fx.Node, names: Mapping[fx.Node, str]) -> StepEvent:
    made = (names[node],) if viewed(node) is None else ()
    written = _named(_destinations(node), names)
    drawn = (*_generators(generators_of(node)), *_groups([node]))
    read = (*_named(node.all_input_nodes, names), *drawn)
    return StepEvent(node.name, Lane.DEVICE, read, (*made, *written, *drawn))


def _task(
    node: fx.Node, view: TaskStart, placed: StepGraph, names: Mapping[fx.Node, str]
) -> StepEvent:
    lane, read, written = _work(node, view, placed)
    drawn = _generators(generators_of(node))
    reads, writes = _named(read, names), _named(written, names)
    if isinstance(view, Offload | Prefetch) and view.launch.part:
        whole = names[_on_host(view)]
        part = {whole: (_part_name(whole, view),)}
        reads, writes = _in_parts(reads, part), _in_parts(writes, part)
    return StepEvent(
        view.launch.task,
        lane,
        (*reads, *drawn),
        (*writes, *drawn),
        tuple(view.launch.after),
        tuple(view.launch.after_previous),
    )


def _work(
    node: fx.Node, view: TaskStart, placed: StepGraph
) -> tuple[Lane, list[fx.Node], list[fx.Node]]:
    """On which lane a task runs, and what it reads and writes."""
    match view:
        case Offload(source, _, destination):
            return Lane.D2H, [source], [node if destination is None else destination]
        case Prefetch(source, _, destination):
            return Lane.H2D, [source], [node if destination is None else destination]
        case HostCast(source):
            return Lane.HOST, [source], [node]
        case RegionCall():
            read = [value for value in view.inputs if isinstance(value, fx.Node)]
            return Lane.HOST, read, _written_by_region(view, placed)
        case _:
            assert_never(view)


def _written_by_region(call: RegionCall, placed: StepGraph) -> list[fx.Node]:
    given = call.given(placed.module)
    written = writes(call.subgraph(placed.module).graph)
    return [given[base_of(destination)] for _, destination, _ in written]


def _memory_on(view: TaskNode) -> Tier | None:
    """Where the node of `view` makes new memory; None where it makes none."""
    match view:
        case Offload(destination=None) | HostCast():
            return Tier.HOST
        case Prefetch(destination=None):
            return Tier.DEVICE
        case Offload() | Prefetch() | RegionCall() | Wait() | WaitPrevious():
            return None
        case _:
            assert_never(view)


def _destinations(node: fx.Node) -> list[fx.Node]:
    """What an op writes in place, by its schema; of a wait, what its collective has made."""
    if is_wait(node):
        return node.all_input_nodes
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    pairs = zip(schema.arguments, node.args, strict=False)
    return [
        value
        for argument, value in pairs
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(value, fx.Node)
    ]


def _computes(node: fx.Node) -> bool:
    """Whether a node touches memory: a view, an item of a tuple or a size does not."""
    if node.target is operator.getitem or isinstance(node.meta.get("val"), torch.SymInt | int):
        return False
    return is_write(node) or is_wait(node) or viewed(node) is None


def _buffer_names(placed: StepGraph) -> dict[fx.Node, str]:
    """The buffer that each node has made or shows. Inputs have the user's names."""
    names = {}
    for node in placed.nodes:
        base = base_of(node)
        item = placed.input_of_node.get(base.name)
        names[node] = base.name if item is None else item.name
    return names


def _freed_after(placed: StepGraph, names: Mapping[fx.Node, str]) -> dict[fx.Node, tuple[str, ...]]:
    """By node, the buffers that the device has made and that nothing has after it."""
    made = {
        names[node]
        for node in placed.nodes
        if node.op == "call_function" and viewed(node) is None and not _is_on_host(node)
    }
    last: dict[str, fx.Node] = {}
    for node in placed.nodes:
        for value in (node, *node.all_input_nodes):
            if names[value] in made:
                last[names[value]] = node
    freed: dict[fx.Node, tuple[str, ...]] = {}
    for buffer, node in last.items():
        if node.op != "output":
            freed[node] = (*freed.get(node, ()), buffer)
    return freed


def _is_on_host(node: fx.Node) -> bool:
    """Whether the node of a task makes memory there."""
    view = view_of(node)
    return view is not None and _memory_on(view) is Tier.HOST


def _named(nodes: Iterable[fx.Node], names: Mapping[fx.Node, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names[node] for node in nodes))
