"""Calls: the nodes of a placed graph in their order, with what it takes to run each.

In: a placed step graph. Out: a `Call` for every node that does something. All that is the same in
every step is looked up here, once.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, assert_never

import torch
from torch import fx

from cotrain_compile.dataflow import PERSISTENT_ROLES, Role
from cotrain_compile.graph import StepGraph, returns_argument_memory, writes
from cotrain_compile.graph.collectives import awaited_by, is_collective
from cotrain_compile.passes.views import base_of
from cotrain_compile.runtime.bound_ops import Bound, Values, bound
from cotrain_compile.runtime.carry_out import Carry, carrying_out, carrying_out_together
from cotrain_compile.runtime.meter import last_uses
from cotrain_compile.runtime.task_nodes import (
    HostCast,
    Offload,
    Prefetch,
    RegionCall,
    TaskNode,
    Wait,
    WaitPrevious,
    start_of,
    view_of,
)

COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Write:
    """A tensor of the user's is written: by `task`, or where that is None as the node runs.

    It is one of so many `parts` of the tensor that are written one after the other.
    """

    name: str
    role: Role
    task: str | None = None
    parts: int = 1

    @property
    def is_update(self) -> bool:
        """Whether it belongs to the update: running statistics are the forward's."""
        return self.role is not Role.BUFFER


# An argument of a row, from the values of nodes and the results of the rows before.
Column = Callable[[Values, Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class AlikeOps:
    """Ops that are alike, one of each of several updates: one call for all of their tensors.

    `compute` has their results from the `columns` of their arguments. Where it `copies` these are
    what it writes over; `writes` and `overwrites_input` are as of `Call`. `kept` are the
    nodes, with their places, whose results are needed behind the rows; of the rows in `done_with`
    nobody needs the results after this one.
    """

    nodes: Sequence[fx.Node]
    compute: Callable[..., Sequence[Any]]
    columns: Sequence[Column]
    copies: bool
    overwrites_input: bool
    writes: Sequence[Write]
    kept: Sequence[tuple[int, fx.Node]]
    done_with: Sequence[int]


@dataclass(frozen=True, slots=True)
class Call:
    """A node and what running it takes.

    `compute` is what an op does; `carry` is what starts or waits for a task, None for an op. An op
    that `is_plain` is run, counted and nothing else. `writes` has the user's tensors that it
    writes, `overwrites_input` says whether all it does is to write one of the inputs. Of the memory
    of its result, `is_new` says whether it is new, `may_be_spare` whether it may be larger than
    the result, and `traced_bytes` how large it is in the trace (0 where sizes are dynamic). `items`
    has, of a segment, the nodes that take out its results, with their places among them.
    `last_readers` has the node that takes out each of several results last, `takes` the node whose
    result at an index nobody takes out after this one; `done_with` are the values that nobody needs
    after it. `exchanges` says whether it begins an exchange between ranks, `awaits` which one it
    waits for. With `rows` it runs several updates in lock step, up to its node; the nodes
    `together` are the bundle that it starts, of which its node is the last.
    """

    node: fx.Node
    compute: Bound
    carry: Carry | None
    writes: Sequence[Write]
    overwrites_input: bool
    is_new: bool
    may_be_spare: bool
    traced_bytes: int
    items: Sequence[tuple[fx.Node, int]]
    last_readers: Mapping[Any, fx.Node]
    takes: tuple[fx.Node, Any] | None
    done_with: Sequence[fx.Node]
    exchanges: bool
    awaits: fx.Node | None
    is_plain: bool
    rows: Sequence[AlikeOps] = ()
    together: Sequence[fx.Node] = ()

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """All that it runs."""
        return [node for row in self.rows for node in row.nodes] or self.together or [self.node]


def _traced_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    nbytes = value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0
    return nbytes if isinstance(nbytes, int) else 0


def calls_of(placed: StepGraph, more_writes: Mapping[fx.Node, Sequence[Write]]) -> list[Call]:
    """The calls of `placed` in their order; `more_writes` are those inside of submodules."""
    written = {**_persistent_writes(placed), **more_writes}
    graph = placed.module.graph
    readers, done_with = _last_readers(graph), last_uses(graph)
    calls: list[Call] = []
    alongside, idle = False, dict[fx.Node, bool]()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or _is_item_of_a_segment(node):
            continue
        view, is_segment = view_of(node), node.op == "call_module"
        idle[node] = alongside
        shows_argument = node.target is operator.getitem or returns_argument_memory(node)
        last_readers = {} if is_segment else readers.get(node, {})
        takes, exchanges, awaits = _takes(node, readers), is_collective(node), awaited_by(node)
        # A dry run leaves such a copy out, whosever the input is.
        overwrites_input = node.target is COPY and base_of(node.args[0]).op == "placeholder"
        does_more = (
            view or is_segment or node in written or overwrites_input or takes or last_readers
        )
        calls.append(
            Call(
                node=node,
                compute=_no_op if view or is_segment else bound(node),
                carry=carrying_out(node, view, alongside=alongside) if view else None,
                writes=written.get(node, ()),
                overwrites_input=overwrites_input,
                is_new=view is None and not shows_argument,
                # An op may leave a small result in a large storage.
                may_be_spare=not shows_argument and isinstance(node.target, torch._ops.OpOverload),
                traced_bytes=_traced_bytes(node),
                items=[(user, user.args[1]) for user in node.users] if is_segment else (),
                last_readers=last_readers,
                takes=takes,
                done_with=[n for n in done_with.get(node, ()) if not (is_segment and n is node)],
                exchanges=exchanges,
                awaits=awaits,
                is_plain=not (does_more or exchanges or awaits),
            )
        )
        alongside = _leaves_idle(view, alongside)
    return list(_in_bundles(calls, idle))


def _in_bundles(calls: Sequence[Call], idle: Mapping[fx.Node, bool]) -> Iterator[Call]:
    """`calls` with those of each bundle that stand side by side as one.

    `idle` says where the device has been given nothing since the copy that was started last.
    """
    for (bundle, _), group in groupby(calls, lambda call: _bundle_of(call.node)):
        members = list(group)
        if not bundle or len(members) == 1:
            yield from members
            continue
        nodes = [call.node for call in members]
        views = [view for view in map(view_of, nodes) if view is not None]
        yield replace(
            members[-1],
            carry=carrying_out_together(nodes, views, alongside=idle[nodes[0]]),
            writes=[write for call in members for write in call.writes],
            done_with=[value for call in members for value in call.done_with],
            together=nodes,
        )


def _bundle_of(node: fx.Node) -> tuple[str, object]:
    """Its name, "" where there is none, and the kind of task."""
    start = start_of(node)
    return (start.launch.bundle, node.target) if start is not None else ("", None)


def _no_op(values: Values) -> None:
    """Of a task or a segment: what carries it out is known elsewhere."""
    raise AssertionError("it is no op")


def _is_item_of_a_segment(node: fx.Node) -> bool:
    """Whether it is there as soon as the segment has run: no call of its own takes it out."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.op == "call_module"


def _leaves_idle(view: TaskNode | None, alongside: bool) -> bool:
    """Whether the device has been given nothing since the copy that was started last."""
    match view:
        case Offload() | Prefetch():
            return True
        case HostCast() | RegionCall():
            return alongside
        case Wait() | WaitPrevious() | None:
            return False
        case _:
            assert_never(view)


def _takes(
    node: fx.Node, readers: Mapping[Any, Mapping[Any, fx.Node]]
) -> tuple[fx.Node, Any] | None:
    if node.target is not operator.getitem:
        return None
    source: Any
    source, index = node.args
    return (source, index) if readers.get(source, {}).get(index) is node else None


def _last_readers(graph: fx.Graph) -> dict[Any, dict[Any, fx.Node]]:
    """For each node with several results, the last node that takes each result out."""
    found: dict[Any, dict[Any, fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        source, index = node.args
        if all(user.target is operator.getitem for user in source.users):
            found.setdefault(source, {})[index] = node
    return found


def _persistent_writes(placed: StepGraph) -> dict[fx.Node, list[Write]]:
    """What each node writes of the parameters, states, gradients and buffers of the user's."""
    graph = placed.module.graph
    found: dict[fx.Node, list[Write]] = {}

    parts = Counter[str]()

    def note(node: fx.Node, destination: Any, task: str | None = None) -> None:
        item = placed.input_of_node.get(base_of(destination).name)
        if item is not None and item.role in PERSISTENT_ROLES:
            found.setdefault(node, []).append(Write(item.name, item.role, task))
            parts[item.name] += _is_part(node, destination)

    for node, destination, _ in writes(graph):
        note(node, destination)
    for node in graph.nodes:
        for destination, task in _written_by_task(view_of(node), placed.module):
            note(node, destination, task)
    return {
        node: [replace(write, parts=max(1, parts[write.name])) for write in written]
        for node, written in found.items()
    }


def _is_part(node: fx.Node, destination: fx.Node) -> bool:
    """Whether `node` writes a part of the tensor that `destination` shows."""
    start = start_of(node)
    if start is not None:
        return bool(start.launch.part)
    return destination.op != "placeholder"


def _written_by_task(
    view: TaskNode | None, module: fx.GraphModule
) -> Iterator[tuple[fx.Node, str]]:
    """What the task of a node writes over, and its name."""
    match view:
        case Offload() | Prefetch():
            if view.destination is not None:
                yield view.destination, view.launch.task
        case RegionCall() if view.guesses:
            pass  # it is the user's when it is confirmed, and taken back where that never comes
        case RegionCall():
            given = view.given(module)
            for _, destination, _ in writes(view.subgraph(module).graph):
                yield given[destination], view.launch.task
        case HostCast() | Wait() | WaitPrevious() | None:
            pass
        case _:
            assert_never(view)
