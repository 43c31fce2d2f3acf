"""Counts: how far a trace has come, told as phases, since that of a large model takes minutes.

Private torch API used: `SubgraphTracer.create_node`, which puts each call into Dynamo's graph, and
`PropagateUnbackedSymInts.run_node`, by which AOTAutograd runs that graph twice: once to see what it
writes, once to lower it. Reason: nothing public says how far either is. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx
from torch._dynamo.output_graph import SubgraphTracer
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from cotrain_compile.support.phases import is_listened, tell_phase

EVERY = 100  # calls between two counts
_RUNS = 2


@contextmanager
def calls_counted() -> Iterator[None]:
    """Within it, tell how many calls Dynamo's graph has."""
    if not is_listened():
        yield
        return
    original = SubgraphTracer.create_node

    @functools.wraps(original)
    def create_node(self: SubgraphTracer, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(self, *args, **kwargs)
        # Of the graph itself, which begins anew where Dynamo does, not of a checkpoint's in it.
        count = len(self.graph.nodes)
        if self.parent is None and count % EVERY == 0:
            _tell_calls(count)
        return node

    _tell_calls(0)
    with mock.patch.object(SubgraphTracer, "create_node", create_node):
        yield


def _tell_calls(count: int) -> None:
    tell_phase(f"tracing: 1 of 3, the step's Python: {count:,} calls")


@contextmanager
def lowering_counted(calls: int) -> Iterator[None]:
    """Within it, tell which share of `calls`, those of Dynamo's graph, is lowered."""
    if not is_listened():
        yield
        return
    original = PropagateUnbackedSymInts.run_node
    count = 0

    @functools.wraps(original)
    def run_node(self: PropagateUnbackedSymInts, node: fx.Node) -> Any:
        nonlocal count
        count += 1
        if count % EVERY == 0:
            _tell_lowered(count, calls)
        return original(self, node)

    _tell_lowered(0, calls)
    with mock.patch.object(PropagateUnbackedSymInts, "run_node", run_node):
        yield


def _tell_lowered(count: int, calls: int) -> None:
    percent = min(100 * count // (_RUNS * calls), 100)
    tell_phase(f"tracing: 2 of 3, lowering: {percent} % of {calls:,} calls")


def tell_ops(graph: fx.Graph) -> None:
    """Say that the step is lowered, and how many ops it is."""
    tell_phase(f"tracing: 3 of 3, what each op reads and costs: {len(graph.nodes):,} ops")
