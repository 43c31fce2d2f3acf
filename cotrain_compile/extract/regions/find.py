"""Find: the regions of a step, as a graph and as plain data.

In: a StepGraph. Out: a `FoundRegion` for each, with its `Region`. The loss of a language model is
one: its logits are wide, and what the backward reads of it is what the loss has made and a scalar,
so that each part runs forward and backward before the next begins.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.dataflow import Phase
from cotrain_compile.dataflow.regions import Collected, Counted, Ends, Region, RegionOp, Window
from cotrain_compile.extract.op_bytes import nbytes_of
from cotrain_compile.extract.op_costs import scratch_name
from cotrain_compile.extract.regions.attention import around_kernel, is_kernel, kernels
from cotrain_compile.extract.regions.calls import shape_of
from cotrain_compile.extract.regions.dispatch import around_mask, masks
from cotrain_compile.extract.regions.grow import Grown, grow, leaves
from cotrain_compile.extract.regions.halves import Halves
from cotrain_compile.extract.regions.rows import Rows
from cotrain_compile.extract.regions.starts import (
    ENOUGH,
    FEW,
    MATRIX_PRODUCTS,
    NEAR,
    WIDE,
    as_wide_as,
    elements,
    is_product,
    kind_of,
    of_elements,
    rows_of,
    taken_of,
    widens,
)
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.graph.op_calls import arguments_of
from cotrain_compile.graph.random_ops import generators_of

aten = torch.ops.aten
_LIKELIHOODS = frozenset({aten._log_softmax.default, aten.logsumexp.default})
# Of classes in the second dimension; the other has places of images, or of sequences, behind it.
LIKELIHOOD_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_HALF = (torch.bfloat16, torch.float16)
_MEAN = 1  # of `reduction`


@dataclass(frozen=True)
class FoundRegion:
    """A region of a graph: `grown` are its nodes, `region` the same as data."""

    region: Region
    grown: Grown


def find_regions(step: StepGraph, buffer_of: Mapping[str, str]) -> tuple[FoundRegion, ...]:
    """The regions of `step`; `buffer_of` is the name of each value's buffer, by node.

    None where sizes are dynamic: how many rows there are is then not known.
    """
    nodes = step.nodes
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in nodes):
        return ()
    found = [each for logits in _logits(step) if (each := _loss(step, nodes, logits)) is not None]
    alone = [each for each in found if _is_alone(each, found)]
    inner = _inner(step, nodes, {node for each in found for node in each.ops})
    kinds = [*(("loss", each) for each in alone), *inner]
    told = (_told(step, name, kind, each, buffer_of) for name, kind, each in _named(kinds))
    return tuple(each for each in told if each is not None)


def _named(found: Sequence[tuple[str, Grown]]) -> Iterator[tuple[str, str, Grown]]:
    """Regions with names, the kinds in the order of the step."""
    for kind in dict.fromkeys(kind for kind, _ in found):
        own = [each for other, each in found if other == kind]
        for index, each in enumerate(own):
            yield (kind if len(own) == 1 else f"{kind}.{index}"), kind, each


def _inner(
    step: StepGraph, nodes: Sequence[fx.Node], taken: set[fx.Node]
) -> list[tuple[str, Grown]]:
    """What runs in parts around products that make more than they read, and their backward.

    That of the widest product first: attention is one of its own, and none of the product before.
    What sends tokens to experts is found before them all, and then fused kernels of attention.
    """
    at = {node: index for index, node in enumerate(nodes)}
    found = dict[int, tuple[str, Grown]]()
    for mask in masks(step):
        sent = around_mask(step, nodes, at, mask) if mask not in taken else None
        if sent is not None and taken.isdisjoint(sent.ops):
            taken.update(sent.ops)
            found[at[mask]] = ("dispatch", sent)
    halves = Halves(step)
    for kernel in kernels(step, halves):
        fused = around_kernel(halves, nodes, at, kernel)
        if fused is not None and taken.isdisjoint({*fused.ops, *fused.ends}):
            taken.update(fused.ops, fused.ends)
            found[at[kernel]] = ("attention", fused)
    starts = [
        node
        for node in nodes
        if is_product(node) and node not in taken and halves.is_forward(node) and widens(node)
    ]
    for node in sorted(starts, key=lambda node: -elements(node)):
        grown = _in_most_rows(halves, nodes, at, node, taken) if node not in taken else None
        if grown is not None:
            taken.update(grown.ops, grown.ends)
            found[at[node]] = (kind_of(node), grown)
    return [found[place] for place in sorted(found)]


def _in_most_rows(
    halves: Halves,
    nodes: Sequence[fx.Node],
    at: Mapping[fx.Node, int],
    product: fx.Node,
    taken: set[fx.Node],
) -> Grown | None:
    """The first way to run in parts with `product` that has enough rows, else that with most."""
    most: Grown | None = None
    for rows, length in rows_of(product):
        grown = _around(halves, nodes, at, product, rows, length)
        if grown is not None and taken.isdisjoint({*grown.ops, *grown.ends}):
            most = grown if most is None or grown.length > most.length else most
            if length >= (ENOUGH if kind_of(product) != "experts" else FEW):
                break
    return most


def _around(
    halves: Halves,
    nodes: Sequence[fx.Node],
    at: Mapping[fx.Node, int],
    product: fx.Node,
    rows: Rows,
    length: int,
) -> Grown | None:
    """What runs in `length` rows, or parts of them, with `product`, and what of its backward."""
    wide = as_wide_as(product)
    near = nodes[max(0, at[product] - NEAR) : at[product] + NEAR]
    ahead = halves.beside(product, near)
    grown = grow(ahead, {product: rows}, wide, Grown(length))
    if not grown.windows[0] or grown.sums or grown.counted:
        return None
    read = [at[user] for node in grown.rows for user in node.users if user in at]
    late = [place for place in read if not halves.is_forward(nodes[place])]
    if late:
        behind = nodes[max(0, min(late) - NEAR) : max(late) + NEAR]
        first = set(ahead)
        back = [n for n in behind if halves.is_backward(n) and n not in first]
        if product.name in halves.again:  # its backward begins before that has run
            together = sorted((*ahead, *back), key=at.__getitem__)
            grown = grow(together, {product: rows}, wide, Grown(length))
        else:
            grown = grow(back, {}, wide, grown)
    wide_ones = (n for n in grown.rows if wide(n) and not _is_of_weight(n, grown))
    if not all(grown.windows) or grown.unread or any(leaves(n, grown) for n in wide_ones):
        return None
    return grown


def _is_of_weight(node: fx.Node, grown: Grown) -> bool:
    """Whether it is the gradient of a weight that a part has its rows of, as those of experts."""
    weights = (n for n in grown.needs if taken_of(n).op == "placeholder")
    return is_product(node) and any(shape_of(n) == shape_of(node) for n in weights)


def _logits(step: StepGraph) -> Iterator[fx.Node]:
    """The products of the forward that a likelihood is made of, each once, if they are wide."""
    seen = set[fx.Node]()
    for node in step.nodes:
        if node.target in _LIKELIHOODS and _is_forward(step, node):
            source: Any = node.args[0]
            while source.op == "call_function" and source.target not in MATRIX_PRODUCTS:
                source = max(source.all_input_nodes, key=elements, default=node.graph._root)
            if source.target in MATRIX_PRODUCTS and source not in seen:
                seen.add(source)
                if widens(source):
                    yield source


def _is_forward(step: StepGraph, node: fx.Node) -> bool:
    return step.phases.get(node.name, Phase.FORWARD) is Phase.FORWARD


def _loss(step: StepGraph, nodes: Sequence[fx.Node], logits: fx.Node) -> Grown | None:
    """What runs in parts with the logits: of all tokens, or else of sequences."""
    behind = nodes[nodes.index(logits) + 1 :]
    for rows, length in rows_of(logits):
        wide = of_elements(WIDE * elements(logits))
        grown = grow([logits, *behind], {logits: rows}, wide, Grown(length))
        has_backward = any(not _is_forward(step, node) for node in grown.ops)
        leaving = (n for n in grown.rows if leaves(n, grown) and wide(n))
        if has_backward and next(leaving, None) is None:
            return grown
    return None


def _is_alone(grown: Grown, found: Sequence[Grown]) -> bool:
    """Whether it is no chunk of a loss that the user has in chunks: these read one hidden state."""
    hidden = _hidden(grown)
    return sum(_hidden(other) is hidden for other in found) == 1


def _hidden(grown: Grown) -> fx.Node:
    return taken_of(next(n for n in grown.ops[0].all_input_nodes if n in grown.needs))


def _told(
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
    told = tuple(window for window in windows if window is not None)
    if len(told) < len(windows):
        return None
    ends = tuple(_ends(node, grown, buffer_of) for node in _in_order(grown.ends))
    rows = tuple(dict.fromkeys(sliced))
    return FoundRegion(Region(name, kind, grown.length, told, rows, ends), grown)


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


__all__ = ["FoundRegion", "Rows", "find_regions"]
