"""Accesses: what the nodes of a placed graph read and write, for `analysis.races`.

In: a step graph with tasks. Out: its `Event`s in the order of its nodes, and the buffers that
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
from typing import Any

import torch
from torch import fx

from cotrain_compile.analysis.races import Event, Race, find_race
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.passes.views import COPY, viewed
from cotrain_compile.plan import Lane
from cotrain_compile.random_ops import generators_in, generators_of
from cotrain_compile.runtime.ops import TASKS, cotrain, host_region, task_name

LANES: Mapping[Any, Lane] = {
    cotrain.offload: Lane.D2H,
    cotrain.offload_into: Lane.D2H,
    cotrain.prefetch: Lane.H2D,
    cotrain.prefetch_into: Lane.H2D,
    cotrain.host_cast: Lane.HOST,
    host_region: Lane.HOST,
}
ON_HOST = (cotrain.offload, cotrain.host_cast)


def find_race_in(placed: StepGraph) -> Race | None:
    """The first race of a placed step that runs again and again, None where there is none."""
    return find_race(list(find_accesses(placed)), {*_outliving(placed)})


def find_accesses(placed: StepGraph) -> Iterator[Event]:
    """What happens in a placed step, in the order of its nodes."""
    names = _buffer_names(placed)
    freed = _freed_after(placed, names)
    for node in placed.nodes:
        if node.op == "output":
            yield Event("what the step returns", Lane.DEVICE, _named(node.all_input_nodes, names))
        elif node.op == "call_function":
            yield from _events_of(node, placed, names)
        if node in freed:
            yield Event(f"freeing memory after {node.name}", Lane.DEVICE, writes=freed[node])
    yield Event("the end of the step", Lane.DEVICE, writes=_outliving(placed), ends_step=True)


def _outliving(placed: StepGraph) -> tuple[str, ...]:
    """What is the user's between two steps: inputs, and the generators that are drawn from."""
    inputs = (item.name for item in placed.inputs)
    return (*inputs, *_generators(generators_in(placed.module.graph)))


def _generators(devices: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"generator.{device}" for device in devices)


def _events_of(node: fx.Node, placed: StepGraph, names: Mapping[fx.Node, str]) -> Iterator[Event]:
    made = (names[node],) if _makes_memory(node) else ()
    if node.target is cotrain.wait:
        yield Event(node.name, Lane.DEVICE, after=_texts(node.args[0]))
    elif node.target is cotrain.wait_previous:
        yield Event(node.name, Lane.DEVICE, after_previous=_texts(node.args[0]))
    elif node.target in TASKS:
        yield Event(f"the issue of {task_name(node)}", Lane.DEVICE, writes=made)
        yield _task(node, placed, names)
    elif _computes(node):
        written = _named(_destinations(node), names)
        drawn = _generators(generators_of(node))
        read = (*_named(node.all_input_nodes, names), *drawn)
        yield Event(node.name, Lane.DEVICE, read, (*made, *written, *drawn))


def _task(node: fx.Node, placed: StepGraph, names: Mapping[fx.Node, str]) -> Event:
    # The arguments are those that `runtime.ops` defines.
    task: Any
    after: Any
    tensors: Any
    previous: list[Any]
    written: list[Any]
    if node.target is host_region:
        _, task, after, tensors, *previous = node.args
        written = _written_by_region(node, placed)
    elif node.target in (cotrain.offload_into, cotrain.prefetch_into):
        destination, source, task, after, *previous = node.args
        tensors, written = [source], [destination]
    elif node.target is cotrain.host_cast:
        source, _, task, after, *previous = node.args
        tensors, written = [source], [node]
    else:
        source, task, after, *previous = node.args
        tensors, written = [source], [node]
    reads = [value for value in tensors if isinstance(value, fx.Node)]
    earlier = _texts(previous[0]) if previous else ()
    drawn = _generators(generators_of(node))
    return Event(
        str(task),
        LANES[node.target],
        (*_named(reads, names), *drawn),
        (*_named(written, names), *drawn),
        _texts(after),
        earlier,
    )


def _written_by_region(call: fx.Node, placed: StepGraph) -> list[fx.Node]:
    called: Any = call.args[0]
    region: Any = placed.module.get_submodule(str(called.target))
    arguments: Any = call.args[3]
    given = dict(zip(region.graph.find_nodes(op="placeholder"), arguments, strict=True))
    return [given[_base(destination)] for _, destination, _ in writes(region.graph)]


def _destinations(node: fx.Node) -> list[fx.Node]:
    """What an op writes in place, by its schema."""
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
    return node.target is COPY or viewed(node) is None


def _makes_memory(node: fx.Node) -> bool:
    return node.target not in _WITHOUT_RESULT and viewed(node) is None and _computes(node)


_WITHOUT_RESULT = (
    host_region,
    cotrain.wait,
    cotrain.wait_previous,
    cotrain.offload_into,
    cotrain.prefetch_into,
)


def _base(node: fx.Node) -> fx.Node:
    while (source := viewed(node)) is not None:
        node = source
    return node


def _buffer_names(placed: StepGraph) -> dict[fx.Node, str]:
    """The buffer that each node has made or shows. Inputs have the user's names."""
    names = {}
    for node in placed.nodes:
        base = _base(node)
        item = placed.input_of_node.get(base.name)
        names[node] = base.name if item is None else item.name
    return names


def _freed_after(placed: StepGraph, names: Mapping[fx.Node, str]) -> dict[fx.Node, tuple[str, ...]]:
    """By node, the buffers that the device has made and that nothing has after it."""
    made = {
        names[node]
        for node in placed.nodes
        if node.op == "call_function" and viewed(node) is None and node.target not in ON_HOST
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


def _named(nodes: Iterable[fx.Node], names: Mapping[fx.Node, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names[node] for node in nodes))


def _texts(names: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in names)
