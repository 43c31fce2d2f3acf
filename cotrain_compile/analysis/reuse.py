"""Reuse distance: how long a parameter's update may take before the next step waits for it.

In: a Dataflow and the seconds of every op. Out: for each parameter, the work between the op that
finishes its gradient and the first use of the parameter in the next step, across the step
boundary. That is the window in which a host update hides; the first layers have the shortest,
because their gradients come last and their weights are needed first.

Critical path: the longest chain of dependent ops, which no number of lanes makes shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import networkx

from cotrain_compile.dataflow import Dataflow, UpdateGroup


@dataclass(frozen=True)
class ReuseDistance:
    """Work between `gradient_op` and, in the next step, `next_use_op`; neither is counted.

    `seconds` and `ops` leave out the parameter's own update, which is what the window is for.
    """

    seconds: float
    ops: int
    gradient_op: str
    next_use_op: str


def reuse_distances(
    dataflow: Dataflow, seconds: Mapping[str, float]
) -> Mapping[str, ReuseDistance]:
    """Reuse distances by parameter, from the seconds of every op by name.

    A parameter whose gradient no op writes, or that nothing but its own update uses, has none.
    Raises KeyError for an op without seconds.
    """
    times = [seconds[op.name] for op in dataflow.ops]
    elapsed = list(accumulate(times, initial=0.0))
    writes = _indices(dataflow, "writes")
    reads = _indices(dataflow, "reads")
    distances = {}
    for group in dataflow.updates:
        own = {dataflow.position[name] for name in group.ops}
        gradient = [index for index in writes.get(group.gradient, ()) if index not in own]
        uses = _uses(group, reads, writes, own)
        if not gradient or not uses:
            continue
        last, first = max(gradient), min(uses)
        inside = [index for index in own if index > last or index < first]
        work_s = elapsed[-1] - elapsed[last + 1] + elapsed[first]
        distances[group.param] = ReuseDistance(
            seconds=max(0.0, work_s - sum(times[index] for index in inside)),
            ops=len(times) - last - 1 + first - len(inside),
            gradient_op=dataflow.ops[last].name,
            next_use_op=dataflow.ops[first].name,
        )
    return distances


def _uses(
    group: UpdateGroup,
    reads: Mapping[str, list[int]],
    writes: Mapping[str, list[int]],
    own: set[int],
) -> set[int]:
    """Ops that use the parameter or its low-precision copy; making that copy is no use yet."""
    casts = set(writes.get(group.low_precision, ()))
    direct = set(reads.get(group.param, ()))
    return (direct | set(reads.get(group.low_precision, ()))) - casts - own


def _indices(dataflow: Dataflow, side: str) -> dict[str, list[int]]:
    """Op indices by the name of the buffer that they have on `side`, "reads" or "writes".

    A view reads nothing yet: what uses its result is the first to need the bytes.
    """
    indices: dict[str, list[int]] = {}
    for index, op in enumerate(dataflow.ops):
        if not op.writes and not op.bytes_moved:
            continue
        for name in op.reads if side == "reads" else op.writes:
            indices.setdefault(name, []).append(index)
    return indices


def dependencies(dataflow: Dataflow) -> networkx.DiGraph[str]:
    """The ops by name, in program order, with an edge from each op to those that must follow it.

    An op follows the last writer of what it reads or writes, and the readers of what it writes.
    """
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    writer: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for op in dataflow.ops:
        graph.add_node(op.name)
        before = [writer[name] for name in (*op.reads, *op.writes) if name in writer]
        for name in op.writes:
            before += readers.pop(name, ())
            writer[name] = op.name
        for name in op.reads:
            if name not in op.writes:
                readers.setdefault(name, []).append(op.name)
        graph.add_edges_from((earlier, op.name) for earlier in before)
    return graph


def critical_path_s(dataflow: Dataflow, seconds: Mapping[str, float]) -> float:
    """The seconds along it, from those of every op, in time linear in its dependencies.

    Raises KeyError for an op without seconds.
    """
    graph = dependencies(dataflow)
    ends_s: dict[str, float] = {}
    for op in dataflow.ops:
        before = (ends_s[name] for name in graph.predecessors(op.name))
        ends_s[op.name] = max(before, default=0.0) + seconds[op.name]
    return max(ends_s.values(), default=0.0)
