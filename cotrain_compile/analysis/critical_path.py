"""Critical path: the longest chain of dependent ops, which no number of lanes makes shorter.

In: a Dataflow and the seconds of every op. Out: the chain, its length, and for each op its earliest
and latest start and its slack: how much later it may start without moving the makespan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx

from cotrain_compile.dataflow import Dataflow


@dataclass(frozen=True)
class CriticalPath:
    """`seconds` along the chain `ops`; the starts and the slack of every op by name, in seconds."""

    seconds: float
    ops: tuple[str, ...]
    earliest_s: Mapping[str, float]
    latest_s: Mapping[str, float]
    slack: Mapping[str, float]


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


def critical_path(dataflow: Dataflow, seconds: Mapping[str, float]) -> CriticalPath:
    """The critical path of `dataflow`, in time linear in its dependencies.

    Raises KeyError for an op without seconds.
    """
    graph = dependencies(dataflow)
    names = [op.name for op in dataflow.ops]
    earliest: dict[str, float] = {}
    for name in names:
        ends = (earliest[before] + seconds[before] for before in graph.predecessors(name))
        earliest[name] = max(ends, default=0.0)
    total = max((earliest[name] + seconds[name] for name in names), default=0.0)
    latest: dict[str, float] = {}
    for name in reversed(names):
        starts = (latest[after] for after in graph.successors(name))
        latest[name] = min(starts, default=total) - seconds[name]
    # Sums in two orders differ in the last bits, which is no slack.
    slack = {
        name: late if (late := latest[name] - earliest[name]) > 1e-9 * total else 0.0
        for name in names
    }
    return CriticalPath(total, _chain(graph, earliest, seconds), earliest, latest, slack)


def _chain(
    graph: networkx.DiGraph[str], earliest: Mapping[str, float], seconds: Mapping[str, float]
) -> tuple[str, ...]:
    """From the op that ends last, back along the predecessors that it had to wait for."""

    def end_s(name: str) -> float:
        return earliest[name] + seconds[name]

    chain = []
    candidates = list(earliest)
    while candidates:
        chain.append(max(candidates, key=end_s))
        candidates = list(graph.predecessors(chain[-1]))
    return tuple(reversed(chain))
