"""Preparation: rewrites of the captured graph that need no plan and change no number.

Each takes the graph in place. `PREPARATIONS` is their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from cotrain_compile.capture.aten.bucket_exchanges import bucket_exchanges
from cotrain_compile.capture.aten.exchange_times import wait_late
from cotrain_compile.capture.aten.like_ops import give_zeros_memory, take_shapes_alone
from cotrain_compile.capture.aten.means_over_ranks import take_means_once, takes_mean
from cotrain_compile.capture.aten.sums_over_ranks import scatter_before_sums, sum_once
from cotrain_compile.capture.aten.weights_first import make_weight_gradients_first
from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION, phases
from cotrain_compile.capture.nodes.skipped_values import keep_values_early
from cotrain_compile.capture.nodes.storages import read_instead, storage_key
from cotrain_compile.dataflow import Phase
from cotrain_compile.graph import writes

aten = torch.ops.aten


def drop_redundant_copies(graph: fx.Graph) -> None:
    """`copy(empty_like(x), g)` is `g` when dtype and layout agree: autograd copies every gradient.

    A value that shows an input's storage is left alone: the input may be overwritten later in the
    step, the copy not. So is a copy that the step returns, as a kept gradient: the user's tensors
    share no memory.
    """
    inputs = _input_storages(graph)
    for node in list(graph.find_nodes(op="call_function", target=aten.copy.default)):
        destination, source = node.args[0], node.args[1]
        returned = any(user.op == "output" for user in node.users)
        if returned or not _same_layout(destination, source):
            continue
        if storage_key(source) not in inputs:
            for user in list(node.users):
                read_instead(user, node, source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def write_updates_early(graph: fx.Graph) -> None:
    """Move each `copy_(input, value)` from the end of the graph to where it becomes possible.

    That is after the value exists and the last reader of the old one has run. Later users of the
    value then read the input, so that the value itself is freed: no second copy of a parameter or
    state outlives its own update. A value that the step returns too, as a state that it starts from
    a new parameter, stays: the user's tensors share no memory.
    """
    inputs = _input_storages(graph)
    (output,) = graph.find_nodes(op="output")
    returned = {storage_key(node) for node in output.all_input_nodes}
    order: dict[fx.Node, float] = {node: index for index, node in enumerate(graph.nodes)}
    last_reader: dict[object, fx.Node] = {}
    for node in graph.nodes:
        reads = node.args[1:] if node.target is aten.copy_.default else node.all_input_nodes
        if node.op == "output":  # what it returns of a write, as a kept gradient, is the new value
            reads = [source for source in reads if source.target is not aten.copy_.default]
        for source in reads:
            last_reader[storage_key(source)] = node
    for node, destination, _ in list(writes(graph)):
        value = node.args[1]  # as it is now: two inputs may get one value
        assert isinstance(value, fx.Node)
        reader = last_reader.get(storage_key(destination), value)
        if (
            reader.op == "output"
            or reader.target is aten.copy_.default
            or storage_key(value) in inputs
        ):
            continue  # the old value is needed to the end of the step, and so is the order there
        position = max(value, reader, key=order.__getitem__)
        position.append(node)
        order[node] = order[position] + 0.5
        if storage_key(value) in returned:
            continue
        for user in list(value.users):
            if user.target is not aten.copy_.default and order[user] > order[node]:
                read_instead(user, value, node)


def reduce_gradients_early(graph: fx.Graph) -> None:
    """Add gradients up and take their means over ranks as soon as they are complete.

    The trace adds the gradients of a micro-batch to those before it after the whole backward, and
    takes means over ranks after that; moved up, each gradient is free to go at once.
    """
    _move_up(graph, lambda node: _accumulates(node) or takes_mean(node))


def take_norms_early(graph: fx.Graph) -> None:
    """Take the norms of global-norm clipping as soon as a gradient, or its mean, is there.

    The trace takes them after the whole backward.
    """
    _move_up(graph, _is_norm_of_computed)


def _move_up(graph: fx.Graph, moves: Callable[[fx.Node], bool]) -> None:
    """Move each of these nodes to right behind the last that it reads, where that is by then."""
    for node in list(graph.nodes):
        if moves(node):
            max(node.all_input_nodes).append(node)


def give_updates_their_own_casts(graph: fx.Graph) -> None:
    """Repeat the widening of a low-precision gradient for the update that uses it.

    Under autocast a bfloat16 gradient is widened to its parameter's float32 at the end of the
    backward. As part of the update, the widening can run where the update does, and half the bytes
    cross the link or wait for the optimizer.
    """
    phase, given = phases(graph), False
    for cast in list(graph.find_nodes(op="call_function", target=aten._to_copy.default)):
        source = cast.args[0]
        if phase[cast.name] is not Phase.BACKWARD or not _widens(source, cast):
            continue
        users = [user for user in cast.users if phase.get(user.name) is Phase.OPTIMIZER]
        updates = [user for user in users if user.target is not aten.linalg_vector_norm.default]
        if updates:
            with graph.inserting_before(updates[0]):
                own = graph.call_function(cast.target, cast.args, cast.kwargs)
            own.meta = {"val": torch.empty_like(cast.meta["val"])}  # fake, with its own storage
            for user in updates:
                read_instead(user, cast, own)
            given = True
    if given:
        graph.eliminate_dead_code()


def take_items_at_once(graph: fx.Graph) -> None:
    """Move each item of a tuple right behind what makes that.

    What a checkpoint makes again is taken from where the backward asks for it, and the kernel could
    not run in parts while its items are elsewhere.
    """
    for item in graph.find_nodes(op="call_function", target=operator.getitem):
        last = item.args[0]
        while last.next.target is operator.getitem and last.next.args[0] is item.args[0]:
            last = last.next
        if last < item:
            last.append(item)


PREPARATIONS: tuple[Callable[[fx.Graph], None], ...] = (
    take_items_at_once,
    give_zeros_memory,
    take_shapes_alone,
    drop_redundant_copies,
    make_weight_gradients_first,
    keep_values_early,
    take_means_once,
    sum_once,
    scatter_before_sums,
    write_updates_early,
    reduce_gradients_early,
    bucket_exchanges,
    wait_late,
    take_norms_early,
    give_updates_their_own_casts,
)


def prepare(module: fx.GraphModule) -> None:
    """Apply all preparations to `module` and check that the graph is still sound."""
    for preparation in PREPARATIONS:
        preparation(module.graph)
    module.graph.lint()
    module.recompile()


def _accumulates(node: fx.Node) -> bool:
    """Whether `node` adds a gradient to the one before: of a backward, but not autograd's."""
    annotation = (node.meta.get("custom") or {}).get(PHASE_ANNOTATION)
    added = node.target is aten.add.Tensor and not node.meta.get("autograd_backward")
    return annotation == "backward" and added


def _is_norm_of_computed(node: fx.Node) -> bool:
    if node.target is not aten.linalg_vector_norm.default:
        return False
    return node.all_input_nodes[0].op == "call_function"


def _same_layout(a: object, b: object) -> bool:
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return False
    x, y = a.meta.get("val"), b.meta.get("val")
    return (
        isinstance(x, torch.Tensor)
        and isinstance(y, torch.Tensor)
        and (x.dtype, x.shape, x.stride(), x.device) == (y.dtype, y.shape, y.stride(), y.device)
    )


def _widens(source: object, cast: fx.Node) -> bool:
    if not isinstance(source, fx.Node):
        return False
    return bool(source.meta["val"].element_size() < cast.meta["val"].element_size())


def _input_storages(graph: fx.Graph) -> set[object]:
    return {storage_key(node) for node in graph.find_nodes(op="placeholder")}
