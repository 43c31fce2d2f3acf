"""Offload cuts: ZeRO-Offload's choice of what leaves the device, as a minimum cut of a real step.

In: the Dataflow of a whole step. Out: the strategies that move the fewest bytes, from "all on the
device" to the one that leaves the least there.

A strategy says for each *class* of model state whether it rests on the host, for all parameters
alike: `param` (the master weights), `state` (the optimizer's), `gradient` (before it is widened
to float32) and `weight` (what forward and backward compute with: the low-precision copy, or a copy
of the parameter's size where the parameter itself is used). Forward and backward are fixed on the
device. Casts, updates and all other buffers are free, and the minimum cut between device and host
puts them where the fewest bytes cross. An edge of the cut is one copy of one buffer:

- from its writers to where it rests, once a phase, if any of them is on the other side;
- from where it rests to its readers, once a phase, if any of them is on the other side: what rests
  on the host is fetched for the forward and again for the backward.

Minimised: `traffic_bytes` (both directions, one step); then reported: `device_bytes`, the model
state that rests on the device. Formulation: ZeRO-Offload (Ren et al., USENIX ATC 2021), section
3 and table 1: per parameter 16, 14, 4 and 2 bytes with traffic of 0, 4, 4 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

import networkx
from networkx.algorithms.flow import shortest_augmenting_path

from cotrain_compile.analysis.symmetry import merged
from cotrain_compile.dataflow import Dataflow, Op, Phase, UpdateGroup

CLASSES = ("gradient", "weight", "param", "state")

# Strategies count as equal within this share of the traffic: a loss scale decides nothing.
_TIE = 0.01

_CAST = "aten._to_copy"
_DEVICE, _HOST = ("tier", "device"), ("tier", "host")
Node = tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """One strategy: what is on the host and what that costs a step.

    `name` lists the classes on the host ("gradient+param+state"), or is "nothing". `host_buffers`
    are the buffers of these classes (a weight copy that is no buffer of its own is not listed),
    `host_ops` the ops that the cut puts there, in program order.
    """

    name: str
    host_ops: tuple[str, ...]
    host_buffers: tuple[str, ...]
    device_bytes: int
    traffic_bytes: int


def offload_cuts(dataflow: Dataflow) -> tuple[Cut, ...]:
    """The cut that leaves all on the device, then those of least traffic, most device bytes first.

    Empty for a step without update groups.
    """
    if not dataflow.updates:
        return ()
    dataflow = _with_casts_in_updates(dataflow)
    whole = _flow_graph(dataflow)
    kinds: dict[Node, Hashable] = {_DEVICE: "device", _HOST: "host"}
    for group in dataflow.updates:
        kinds |= {node: name for name, nodes in _members(group).items() for node in nodes}
    graph, alike = merged(whole, kinds)
    nothing, *others = (
        _cut(dataflow, graph, alike, frozenset(classes))
        for size in range(len(CLASSES) + 1)
        for classes in combinations(CLASSES, size)
    )
    least = min(cut.traffic_bytes for cut in others)
    best = [cut for cut in others if cut.traffic_bytes <= least * (1 + _TIE)]
    return (nothing, *sorted(best, key=lambda cut: -cut.device_bytes))


def _with_casts_in_updates(dataflow: Dataflow) -> Dataflow:
    """The same step where the gradient is the narrow one, and widening it part of the update.

    Autograd itself widens a gradient to the dtype of its parameter, in the backward.
    """
    writer = {name: op for op in dataflow.ops for name in op.writes}
    groups = []
    for group in dataflow.updates:
        cast = writer.get(group.gradient)
        if cast is not None and cast.target.startswith(_CAST) and len(cast.reads) == 1:
            (source,) = cast.reads
            if dataflow.buffer[source].nbytes < dataflow.buffer[group.gradient].nbytes:
                group = replace(group, gradient=source, ops=(cast.name, *group.ops))
        groups.append(group)
    return replace(dataflow, updates=tuple(groups))


def _cut(
    dataflow: Dataflow,
    graph: networkx.DiGraph[int],
    alike: Mapping[Node, int],
    classes: frozenset[str],
) -> Cut:
    """The cheapest way to have exactly `classes` on the host.

    `graph` is the flow graph with alike nodes merged, `alike` the class of each.
    """
    graph = graph.copy()
    device, host_side = alike[_DEVICE], alike[_HOST]
    for group in dataflow.updates:
        for name, buffers in _members(group).items():
            for buffer in buffers:
                here = alike[buffer]
                anchor = (here, host_side) if name in classes else (device, here)
                graph.add_edge(*anchor, capacity=inf)
    traffic, (_, host) = networkx.minimum_cut(
        graph, device, host_side, flow_func=shortest_augmenting_path
    )
    host_buffers = (
        buffer
        for group in dataflow.updates
        for name, buffers in _members(group).items()
        if name in classes
        for kind, buffer in buffers
        if kind == "buffer"
    )
    return Cut(
        name="+".join(name for name in CLASSES if name in classes) or "nothing",
        host_ops=tuple(op.name for op in dataflow.ops if alike.get(("op", op.name)) in host),
        host_buffers=tuple(dict.fromkeys(host_buffers)),
        device_bytes=_device_bytes(dataflow, classes),
        traffic_bytes=int(traffic),
    )


def _members(group: UpdateGroup) -> dict[str, tuple[Node, ...]]:
    """The nodes of a parameter's model state by class."""
    return {
        "gradient": (("buffer", group.gradient),),
        "weight": (_weight(group),),
        "param": (("buffer", group.param),),
        "state": tuple(("buffer", name) for name in group.states),
    }


def _weight(group: UpdateGroup) -> Node:
    return ("buffer", group.low_precision) if group.low_precision else ("copy", group.param)


def _device_bytes(dataflow: Dataflow, classes: frozenset[str]) -> int:
    """Model state on the device; a weight copy takes room only where its parameter is not."""
    total = 0
    for group in dataflow.updates:
        for name, buffers in _members(group).items():
            same = name == "weight" and not group.low_precision and "param" not in classes
            if name not in classes and not same:
                total += sum(dataflow.buffer[buffer].nbytes for _, buffer in buffers)
    return total


def _flow_graph(dataflow: Dataflow) -> networkx.DiGraph[Node]:
    """Copies as edges: a cut between device and host costs the bytes that cross, each copy once.

    Buffers that only fixed ops touch stay on the device with them and are left out.
    """
    sizes: dict[Node, int] = {("buffer", b.name): b.nbytes for b in dataflow.buffers}
    sizes |= {
        _weight(g): dataflow.buffer[g.low_precision or g.param].nbytes for g in dataflow.updates
    }
    placed = {node for group in dataflow.updates for m in _members(group).values() for node in m}
    sides = _sides(dataflow)
    free = {buffer for (buffer, *_), ops in sides.items() if ops != {_DEVICE}}
    graph: networkx.DiGraph[Node] = networkx.DiGraph()
    graph.add_nodes_from((_DEVICE, _HOST, *placed))
    for (buffer, phase, direction), ops in sides.items():
        if buffer not in free and buffer not in placed:
            continue
        _join(graph, buffer, (phase, direction), ops, sizes[buffer])
    return graph


def _join(
    graph: networkx.DiGraph[Node], buffer: Node, moment: Node, ops: set[Node], nbytes: int
) -> None:
    """Charge one copy when `buffer` and any of `ops` are on different sides, either way round."""
    if len(ops) == 1:
        # Without helper nodes the graph of a large model is a third of the size.
        (op,) = ops
        for edge in ((buffer, op), (op, buffer)):
            paid = graph.edges[edge]["capacity"] if graph.has_edge(*edge) else 0
            graph.add_edge(*edge, capacity=paid + nbytes)
        return
    away, back = ("away", *buffer, *moment), ("back", *buffer, *moment)
    graph.add_edge(buffer, away, capacity=nbytes)
    graph.add_edge(back, buffer, capacity=nbytes)
    for op in ops:
        graph.add_edge(away, op)
        graph.add_edge(op, back)


def _sides(dataflow: Dataflow) -> dict[tuple[Node, Phase, str], set[Node]]:
    """The nodes that read and that write each buffer in each phase.

    A node that has written a buffer in the same phase has it at hand: its reads are left out.
    """
    sides: dict[tuple[Node, Phase, str], set[Node]] = {}
    for node, phase, reads, writes in _steps(dataflow):
        for buffer in reads:
            if node not in sides.get((buffer, phase, "write"), ()):
                sides.setdefault((buffer, phase, "read"), set()).add(node)
        for buffer in writes:
            sides.setdefault((buffer, phase, "write"), set()).add(node)
    return sides


def _steps(dataflow: Dataflow) -> Iterator[tuple[Node, Phase, list[Node], list[Node]]]:
    """Node, phase, reads and writes of every op that moves bytes; all fixed ops are one node.

    Where the forward uses the parameter itself, a copy of it is made first and used instead, so
    that the parameter can rest elsewhere.
    """
    copied = {group.param for group in dataflow.updates if not group.low_precision}
    for param in sorted(copied):
        yield ("copying", param), Phase.FORWARD, [("buffer", param)], [("copy", param)]
    is_free = _free_ops(dataflow)
    for op in dataflow.ops:
        if not op.writes and not op.bytes_moved:
            continue
        node = ("op", op.name) if is_free(op) else _DEVICE
        kinds = {
            name: "copy" if node == _DEVICE and name in copied else "buffer" for name in op.reads
        }
        reads: list[Node] = [(kinds[name], name) for name in op.reads]
        yield node, op.phase, reads, [("buffer", name) for name in op.writes]


def _free_ops(dataflow: Dataflow) -> Callable[[Op], bool]:
    """Which ops may run on either side: the optimizer, and the casts around it."""
    own: set[str] = {name for group in dataflow.updates for name in group.ops}
    weights: Iterable[str] = (group.low_precision for group in dataflow.updates)
    copies = frozenset(weights) - {""}
    return lambda op: (
        op.phase is Phase.OPTIMIZER or op.name in own or not copies.isdisjoint(op.writes)
    )
