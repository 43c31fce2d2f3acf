"""Told: a region that has grown on a graph, as plain data.

In: the nodes of a region, and the buffers that they show. Out: a `FoundRegion`; None where what
leaves it cannot be collected.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.dataflow.regions import Collected, Counted, Ends, Region, RegionOp, Window
from cotrain_compile.extract.op_bytes import nbytes_of
from cotrain_compile.extract.op_costs import scratch_name
from cotrain_compile.extract.regions.attention import is_kernel
from cotrain_compile.extract.regions.grow import Grown, leaves
from cotrain_compile.extract.regions.rows import Rows
from cotrain_compile.extract.regions.starts import is_product
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.graph.op_calls import arguments_of
from cotrain_compile.graph.random_ops import generators_of

aten = torch.ops.aten
# Of classes in the second dimension; the other has places of images, or of sequences, behind it.
LIKELIHOOD_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_HALF = (torch.bfloat16, torch.float16)
_MEAN = 1  # of `reduction`


@dataclass(frozen=True)
class FoundRegion:
    """A region of a graph: `grown` are its nodes, `region` the same as data."""

    region: Region
    grown: Grown


def told(
    step: StepGraph, name: str, kind: str, grown: Grown, buffer_of: Mapping[str, str]
) -> FoundRegion | None:
    """The region as data; None where what leaves it cannot be collected."""
    if not _all_counted(grown) or _reads_across(grown) or any(leaves(n, grown) for n in grown.own):
        return None
    windows = [_window(step, window, kind, grown, buffer_of) for window in grown.windows]
    sliced = [buffer_of[n.name] for n in grown.rows]
    sliced += [f"{n.name}.{i}" for n, i in _rows_of_several(grown)]
    sliced += [scratch_name(n) for n in grown.ops if is_kernel(n)]
    if any(_is_left_as_a_view(node, grown) for node in grown.ops):
        return None
    whole = tuple(window for window in windows if window is not None)
    if len(whole) < len(windows):
        return None
    ends = tuple(_ends(node, grown, buffer_of) for node in _in_order(grown.ends))
    rows = tuple(dict.fromkeys(sliced))
    return FoundRegion(Region(name, kind, grown.length, whole, rows, ends), grown)


def _window(
    step: StepGraph,
    nodes: Sequence[fx.Node],
    kind: str,
    grown: Grown,
    buffer_of: Mapping[str, str],
) -> Window | None:
    collected = [_collected(node, grown, buffer_of) for node in _results(nodes, grown)]
    later = _later(nodes, grown)
    if any(result is None for result in collected) or later is None:
        return None
    own = [node for node in _in_order(grown.counted) if node.args[0] in nodes]
    return Window(
        tuple(RegionOp(node.name, _whole_bytes(node, grown)) for node in nodes),
        tuple(result for result in collected if result is not None),
        tuple(_counted(node, grown, buffer_of) for node in own),
        tuple(n.name for n in _in_order(grown.unread) if nodes[0] < n < nodes[-1]),
        later,
        joined=kind == "loss",
    )


def _is_left_as_a_view(node: fx.Node, grown: Grown) -> bool:
    """Whether others read it, and it shows what is collected: it is made before there is room."""
    inside = set(grown.ops)
    return not _has_own_memory(node) and any(user not in inside for user in node.users)


def _reads_across(grown: Grown) -> bool:
    """Whether a window reads a view of what a window before has collected, which is there twice."""
    shown = set[fx.Node]()
    for window in grown.windows:
        if any(n in shown for node in window for n in node.all_input_nodes):
            return True
        results = set(_results(window, grown))
        views = {n for n in window if not _has_own_memory(n)}
        for node in window:
            if node in views and not results.union(shown).isdisjoint(node.all_input_nodes):
                shown.add(node)
    return False


def _rows_of_several(grown: Grown) -> Iterator[tuple[fx.Node, int]]:
    """The ops with several results, and which of these are rows."""
    for node, made in grown.results.items():
        yield from ((node, i) for i, each in enumerate(made) if isinstance(each, Rows))


def _in_order(nodes: set[fx.Node]) -> list[fx.Node]:
    return sorted(nodes, key=lambda node: node)


def _results(nodes: Sequence[fx.Node], grown: Grown) -> list[fx.Node]:
    """The values of a window with memory of their own that the rest of the step reads."""
    own = [n for n in nodes if (n in grown.rows or n in grown.sums) and _has_own_memory(n)]
    return [node for node in own if node in grown.sums or leaves(node, grown)]


def _has_own_memory(node: fx.Node) -> bool:
    return node.target is operator.getitem or not is_view(node)


def _all_counted(grown: Grown) -> bool:
    """Whether each mean knows what it is divided by."""
    return all(
        arguments_of(n).get("reduction", _MEAN) != _MEAN or _count_of(n, grown) is not None
        for n in grown.ops
        if n.target in LIKELIHOOD_LOSSES
    )


def _count_of(loss: fx.Node, grown: Grown) -> fx.Node | None:
    return next((n for n in grown.counted if n.args[0] is loss), None)


def _collected(node: fx.Node, grown: Grown, buffer_of: Mapping[str, str]) -> Collected | None:
    value: torch.Tensor = node.meta["val"]
    laid_out = value.permute(in_memory(value))
    if not laid_out.is_contiguous() or value.untyped_storage().nbytes() != nbytes_of(value):
        return None
    op: Any = node.args[0] if node.target is operator.getitem else node
    divided_by, sum_nbytes, is_sum = "", 0, node in grown.sums
    if is_sum and value.dtype in _HALF:
        sum_nbytes = 4 * value.numel()
    if op.target in LIKELIHOOD_LOSSES and is_sum:
        if arguments_of(op).get("reduction", _MEAN) == _MEAN:
            counted = _count_of(op, grown)
            divided_by, sum_nbytes = counted.name if counted is not None else "", 4
        if value.dtype is not torch.float32:
            return None
    dtype = str(value.dtype).removeprefix("torch.")
    at_end = not (is_sum and is_product(op))
    own = buffer_of[node.name]
    permuted = not value.is_contiguous()
    return Collected(
        node.name, op.name, own, is_sum, dtype, sum_nbytes, divided_by, at_end, permuted
    )


def in_memory(value: torch.Tensor) -> list[int]:
    """The dimensions of a value in the order in which they lie in memory, the outermost first."""
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))


def _counted(node: fx.Node, grown: Grown, buffer_of: Mapping[str, str]) -> Counted:
    op: Any = node.args[0]
    target = arguments_of(op)["target"]
    value: torch.Tensor = target.meta["val"]
    own, reads = buffer_of[node.name], buffer_of[target.name]
    return Counted(node.name, op.name, own, reads, value.numel(), nbytes_of(value))


def _ends(node: fx.Node, grown: Grown, buffer_of: Mapping[str, str]) -> Ends:
    op = next(op for op in grown.ops if node in op.all_input_nodes)
    value: torch.Tensor = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    return Ends(node.name, op.name, buffer_of[node.name], nbytes_of(value), dtype)


def _later(nodes: Sequence[fx.Node], grown: Grown) -> tuple[str, ...] | None:
    """What stands between the ops and follows from them; None where it must stay there."""
    inside, behind = set(nodes), dict[fx.Node, None]()  # in the order of the step
    node = nodes[0]
    while node is not nodes[-1]:
        node = node.next
        if node in inside or node in grown.counted or node in grown.unread:
            continue
        if any(n in inside or n in behind for n in node.all_input_nodes):
            if _is_bound(node):
                return None
            behind[node] = None
        elif _is_written(node):
            return None
    return tuple(n.name for n in behind)


def _is_bound(node: fx.Node) -> bool:
    """Whether its place among others matters, beyond what it reads."""
    return _is_written(node) or is_collective(node) or bool(generators_of(node))


def _is_written(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _whole_bytes(node: fx.Node, grown: Grown) -> int:
    """Of the bytes that an op moves, those of what it reads or makes whole in every part."""
    if is_view(node):
        return 0
    given = [_whole(n, grown) for n in node.all_input_nodes]
    return sum(given) + _whole(node, grown)


def _whole(node: fx.Node, grown: Grown) -> int:
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        made = grown.results[node]
        tensors = [
            v
            for v, each in zip(value, made, strict=True)
            if isinstance(v, torch.Tensor) and not isinstance(each, Rows)
        ]
        return sum(int(nbytes_of(v)) for v in tensors)
    rows_of = grown.part_rows_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    shrinks = rows_of is not None and any(
        value.stride(dim) != 0 and value.shape[dim] > 1 for dim in rows_of.dims
    )
    return 0 if shrinks else int(nbytes_of(value))
