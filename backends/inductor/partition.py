"""Partition: a placed graph in stretches of ops that are compiled as one, in between the tasks.

A stretch ends at tasks of the plan, at collectives and waits for them, where the layer changes, at
an op that is to run on its own, and behind one whose result others must not share a loop with.
The order of tasks and ops stays as planned.

What an op writes at places that a tensor names is not read in the same loop:

    %s = scatter(%zeros, -1, %index, %g)
    %a = add(%g, %s)
    %b = mul(%a, %mask)

Before torch 2.15 Inductor may make one loop of these three, in which the second reads what the
first has yet to write: wrong numbers, and no error. It does so where a loop over the index is as
long as one over the result. So a segment ends behind such an op; where one becomes such ops only as
Inductor lowers it, and reads them too, its segment is compiled without fusion. Tried on torch
2.11.0 and 2.13.0, which do it, and on 2.15.0, which does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.graph.collectives import is_collective, is_wait
from cotrain_compile.passes.views import COPY, GIVEN, is_write, viewed
from cotrain_compile.runtime.ops import TASKS

# Compile time of a stretch grows faster than its length.
MOST_OPS = 400


@dataclass(frozen=True)
class LayerOps:
    """Consecutive `ops` of one `layer`; `name` is unique in the step and tells where it is."""

    name: str
    layer: str
    ops: tuple[fx.Node, ...]


def partition(
    graph: fx.Graph, layer_of: Mapping[str, str], is_alone: Callable[[fx.Node], bool]
) -> tuple[LayerOps, ...]:
    """The stretches of `graph` in their order. `is_alone` says which ops belong to none.

    Views are no part of a stretch: what needs one makes it. An item of a tuple goes with the op
    that made the tuple.
    """
    names: dict[str, int] = {}

    def named(layer: str, ops: list[fx.Node]) -> LayerOps:
        name = layer or "outside"
        names[name] = names.get(name, -1) + 1
        return LayerOps(f"{name}:{names[name]}", layer, tuple(ops))

    return tuple(named(layer, ops) for layer, ops in _runs(graph, layer_of, is_alone))


def _runs(
    graph: fx.Graph, layer_of: Mapping[str, str], is_alone: Callable[[fx.Node], bool]
) -> Iterator[tuple[str, list[fx.Node]]]:
    current, run = "", list[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function" or is_shown(node):
            continue
        layer = layer_of.get(node.name, current)
        ends = node.target in TASKS or is_collective(node) or is_wait(node) or is_alone(node)
        if run and (ends or layer != current or len(run) >= MOST_OPS):
            yield current, run
            run = []
        if not ends:
            current = layer
            run.append(node)
        if run and ends_a_segment(node):
            yield current, run
            run = []
    if run:
        yield current, run


def is_shown(node: fx.Node) -> bool:
    """Whether `node` computes nothing: a view, an item of a tuple, the size of a dimension.

    A wait for a collective shows its result, but not before it runs. What a part is given is none:
    with it made inside, no two parts would be the same code.
    """
    if is_wait(node) or GIVEN in node.meta:
        return False
    if node.target is operator.getitem or isinstance(node.meta.get("val"), torch.SymInt | int):
        return True
    return not is_write(node) and viewed(node) is not None


def sink_into_updates(graph: fx.Graph, dataflow: Dataflow) -> None:
    """Move what only one parameter's update uses, as its clipped gradient, right before it.

    There it is fused into the update. An op is moved only where it reads nothing but values that
    ops made, which nobody overwrites, and where what it would have freed is no more than what it
    makes: at no moment the device holds more than planned.
    """
    owner = {op: group.param for group in dataflow.updates for op in group.ops}
    for node in reversed(list(graph.nodes)):
        if node.name not in owner or node.target is COPY or is_shown(node) or not node.users:
            continue
        if {owner.get(user.name) for user in node.users} != {owner[node.name]}:
            continue
        first = min(node.users)
        if node.next is not first and _reads_only_temporaries(node) and _frees_no_more(node):
            first.prepend(node)


def _reads_only_temporaries(node: fx.Node) -> bool:
    return all(
        source.op == "call_function" and source.target not in TASKS
        for source in map(base_of, node.all_input_nodes)
    )


def _frees_no_more(node: fx.Node) -> bool:
    freed = [b for b in map(base_of, node.all_input_nodes) if not _is_used_behind(node, b)]
    return sum(map(_nbytes, freed)) <= _nbytes(node)


def _is_used_behind(place: fx.Node, node: fx.Node) -> bool:
    """Whether anything behind `place` uses `node` or a view of it."""
    # What uses it last mostly is behind `place`: all updates share the coefficient of clipping.
    return any(
        place < user or (is_shown(user) and _is_used_behind(place, user))
        for user in reversed(node.users)
    )


def base_of(node: fx.Node) -> fx.Node:
    """What `node` shows: the op, task, wait input that made its memory, or a part was given."""
    while not is_wait(node) and GIVEN not in node.meta and (source := viewed(node)) is not None:
        node = source
    return node


def _nbytes(node: fx.Node) -> int:
    """Bytes of the memory that `node` makes, at the sizes of the trace."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    nbytes: Any = value.untyped_storage().nbytes()
    # Comparing a symbol would bind it to the size at hand.
    return nbytes if isinstance(nbytes, int) else int(nbytes.node.hint)


aten = torch.ops.aten
SCATTERS = (
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.index_put,
    aten._unsafe_index_put,
    aten._unsafe_masked_index_put_accumulate,
)
# Lowered to one of `SCATTERS`.
MADE_OF_SCATTERS = (
    aten.embedding_dense_backward,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.index_reduce,
    aten.unfold_backward,
)
ARE_FUSED = torch.__version__ < "2.15"
EACH_OP_ALONE = {"max_fusion_size": 1}


def ends_a_segment(op: fx.Node) -> bool:
    """Whether what reads the result of `op`, before it is lowered, goes into another segment.

    So on every torch, for equal segments: no loop may read that result anyway.
    """
    return _packet(op) in (*SCATTERS, *MADE_OF_SCATTERS)


def settings_for(graph: fx.Graph) -> dict[str, Any]:
    """Every op a loop of its own in a lowered graph that reads what it scatters, else nothing."""
    return EACH_OP_ALONE if ARE_FUSED and _reads_what_it_scatters(graph) else {}


def _reads_what_it_scatters(graph: fx.Graph) -> bool:
    return any(
        user.op != "output"
        for node in graph.nodes
        if _packet(node) in SCATTERS
        for user in node.users
    )


def _packet(op: fx.Node) -> object:
    return getattr(op.target, "overloadpacket", None)
