"""Critical path: the longest chain of dependent ops, which no number of lanes makes shorter."""

from __future__ import annotations

from collections.abc import Mapping

import networkx

from cotrain_compile.dataflow import Dataflow


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
