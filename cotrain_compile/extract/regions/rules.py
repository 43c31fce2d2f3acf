"""Rules: how ops treat a dimension that runs in parts.

Out: where the rows of the result of a call are, that it makes shares of a sum over all rows, or
None where a part cannot be made alone; and which rows of its other arguments a part needs. An op
without a rule is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from cotrain_compile.extract.regions.calls import (
    SUM,
    PartCall,
    PartResult,
    Result,
    Rule,
    shape_of,
)
from cotrain_compile.extract.regions.layer_rules import LAYER_RULES
from cotrain_compile.extract.regions.rows import Rows, viewed_rows
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.graph.random_ops import generators_of


def outcome_of(call: PartCall) -> PartResult | None:
    """What a part makes of `call`, None where it must run whole.

    So must what draws random numbers, in which a part would draw others, what exchanges with other
    ranks and what writes into its arguments.
    """
    node = call.node
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or is_collective(node) or generators_of(node):
        return None
    rule = _RULES.get(str(schema.name))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    return rule(call) if rule is not None else None


# Element by element.


def _pointwise(call: PartCall) -> PartResult | None:
    """Each element from those at its place, as broadcasting has it."""
    shape, tensors = call.shape, call.node.all_input_nodes
    found = {call.rows[n].moved(len(shape) - len(shape_of(n))) for n in tensors if n in call.rows}
    if len(found) != 1:
        return None
    (rows,) = found
    return _aligned(call, tensors, shape, rows)


def _aligned(
    call: PartCall, tensors: Sequence[fx.Node], shape: Sequence[int], rows: Rows
) -> PartResult | None:
    """Every argument has the rows of the result, or is the same for all of them."""
    if not _whole_of(call, shape, rows):
        return None
    needs = {}
    for node in tensors:
        sizes = shape_of(node)
        by = len(shape) - len(sizes)
        own = [sizes[dim - by] if dim >= by else 1 for dim in rows.dims]
        if own == [shape[dim] for dim in rows.dims]:
            if node not in call.rows:
                needs[node] = rows.moved(-by)
        elif node in call.rows or any(size != 1 for size in own):
            return None
    return PartResult(rows, needs)


def _whole_of(call: PartCall, shape: Sequence[int], rows: Rows) -> bool:
    size = 1
    for dim in rows.dims:
        size *= shape[dim]
    return rows.last < len(shape) and size % call.length == 0


# Of a dimension that is not split.


def _along(name: str) -> Rule:
    """As element by element, but for the dimension in argument `name`, which must be whole."""

    def rule(call: PartCall) -> PartResult | None:
        found = _pointwise(call)
        dim = (call.argument(name) or 0) % len(call.shape)
        ok = found is not None and isinstance(found.made, Rows) and dim not in found.made.dims
        return found if ok else None

    return rule


def _reduction(call: PartCall) -> PartResult | None:
    """Over other dimensions: the rows of the result; a sum over the rows: a share of it."""
    node = call.argument("self")
    shape, rows = shape_of(node), call.rows[node]
    given = call.argument("dim")
    if given is None or (isinstance(given, list | tuple) and not given):
        given = range(len(shape))
    dims = {dim % len(shape) for dim in ([given] if isinstance(given, int) else given)}
    if dims.isdisjoint(rows.dims):
        kept = call.argument("keepdim")
        return PartResult(rows if kept else rows.moved(-sum(dim < rows.first for dim in dims)))
    is_sum = str(call.node.target).startswith("aten.sum.") and dims.issuperset(rows.dims)
    return PartResult(SUM) if is_sum else None


# Shapes.


def _view(call: PartCall) -> PartResult | None:
    node = call.argument("self")
    made = viewed_rows(call.rows[node], shape_of(node), call.shape, call.length)
    return PartResult(made) if made is not None else None


def _slice(call: PartCall) -> PartResult | None:
    """Of another dimension; `slice_backward` puts the same in zeros."""
    node = call.argument("grad_output") or call.argument("self")
    rows, dim = call.rows.get(node), (call.argument("dim") or 0) % len(call.shape)
    return PartResult(rows) if rows is not None and dim not in rows.dims else None


def _pieces(call: PartCall) -> PartResult | None:
    """Of another dimension, which is cut in several."""
    rows, dim = call.rows[call.argument("self")], (call.argument("dim") or 0) % len(call.shape)
    count = len(call.node.meta["val"])
    return PartResult((rows,) * count) if dim not in rows.dims else None


def _taken_apart(call: PartCall) -> PartResult | None:
    """Of another dimension, which is gone: one of its pieces, or each of them."""
    node, dim = call.argument("self"), call.argument("dim") or 0
    rows, dim = call.rows[node], dim % len(shape_of(node))
    if dim in rows.dims:
        return None
    made = rows.moved(-1) if dim < rows.first else rows
    several = isinstance(call.node.meta["val"], list | tuple)
    return PartResult((made,) * len(call.node.meta["val"]) if several else made)


def _stack(call: PartCall) -> PartResult | None:
    """Beside one another in a new dimension, each with its rows."""
    tensors = call.node.all_input_nodes
    found = {call.rows[node] for node in tensors if node in call.rows}
    dim = (call.argument("dim") or 0) % len(call.shape)
    if len(found) != 1:
        return None
    (rows,) = found
    if rows.first < dim <= rows.last:
        return None
    needs = {node: rows for node in tensors if node not in call.rows}
    return PartResult(rows.moved(1) if dim <= rows.first else rows, needs)


def _same(call: PartCall) -> PartResult | None:
    return PartResult(call.rows[call.argument("self")])


def _unsqueeze(call: PartCall) -> PartResult | None:
    node = call.argument("self")
    rows, dim = call.rows[node], call.argument("dim") % (len(shape_of(node)) + 1)
    if rows.first < dim <= rows.last:
        return None
    return PartResult(rows.moved(1) if dim <= rows.first else rows)


def _squeeze(call: PartCall) -> PartResult | None:
    node = call.argument("self")
    rows, shape, dim = call.rows[node], shape_of(node), call.argument("dim")
    if not isinstance(dim, int):
        return None
    dim %= len(shape)
    if dim in rows.dims:
        return None
    return PartResult(rows.moved(-1) if shape[dim] == 1 and dim < rows.first else rows)


def _permuted(order: Callable[[PartCall, int], Sequence[int]]) -> Rule:
    def rule(call: PartCall) -> PartResult | None:
        node = call.argument("self")
        rows = call.rows[node]
        places = [list(order(call, len(shape_of(node)))).index(dim) for dim in rows.dims]
        first = places[0]
        together = places == list(range(first, first + len(places)))
        return PartResult(Rows(first, places[-1])) if together else None

    return rule


def _swapped(call: PartCall, ndim: int) -> Sequence[int]:
    order = list(range(ndim))
    one, other = call.argument("dim0") % ndim, call.argument("dim1") % ndim
    order[one], order[other] = order[other], order[one]
    return order


def _permutation(call: PartCall, ndim: int) -> Sequence[int]:
    return [dim % ndim for dim in call.argument("dims")]


# Products, by the letters of their dimensions.


def _letters(arguments: Mapping[str, str], *made: str, only: str = "") -> Rule:
    """As einsum: a letter of the rows that the result has not is summed over.

    `only` are the letters that may be split, all where it is empty.
    """

    def rule(call: PartCall) -> PartResult | None:
        split = set[str]()
        given = {n: v for n in arguments if isinstance(v := call.argument(n), fx.Node)}
        for name, node in given.items():
            if node in call.rows:
                rows = call.rows[node]
                if rows.first != rows.last or rows.first >= len(arguments[name]):
                    return None
                split.add(arguments[name][rows.first])
        if len(split) != 1 or (only and not split <= set(only)):
            return None
        (letter,) = split
        return _of_letter(call, letter, {n: arguments[name] for name, n in given.items()}, made)

    return rule


def _of_letter(
    call: PartCall, letter: str, dims: Mapping[fx.Node, str], made: Sequence[str]
) -> PartResult | None:
    needs = {}
    for node, letters in dims.items():
        if letter not in letters:
            if node in call.rows:
                return None
            continue
        at = letters.index(letter)
        if node not in call.rows:
            if shape_of(node)[at] % call.length:
                return None
            needs[node] = Rows(at, at)
        elif call.rows[node] != Rows(at, at):
            return None
    results: tuple[Result, ...] = tuple(
        Rows(r.index(letter), r.index(letter)) if letter in r else SUM for r in made
    )
    return PartResult(results if len(results) > 1 else results[0], needs)


def _addmm(call: PartCall) -> PartResult | None:
    """A product and a bias of its columns, which is the same for all rows."""
    bias = call.argument("self")
    found = _letters({"mat1": "mk", "mat2": "kn"}, "mn")(call)
    if found is None or found.made != Rows(0, 0) or bias in call.rows or bias in found.needs:
        return None
    sizes = shape_of(bias)
    return found if len(sizes) == 1 or (len(sizes) == 2 and sizes[0] == 1) else None


# Look-ups.


def _embedding(call: PartCall) -> PartResult | None:
    rows = call.rows.get(call.argument("indices"))
    return (
        PartResult(rows) if rows is not None and call.argument("weight") not in call.rows else None
    )


def _gather(call: PartCall) -> PartResult | None:
    """Each row has its own indices along another dimension."""
    source, index, dim = (call.argument(name) for name in ("self", "index", "dim"))
    rows = call.rows.get(source, call.rows.get(index))
    shape = shape_of(source)
    if rows is None or dim % len(shape) in rows.dims:
        return None
    sizes = [shape_of(n)[d] for n in (source, index) for d in rows.dims]
    if sizes[: len(sizes) // 2] != sizes[len(sizes) // 2 :]:
        return None
    if any(n in call.rows and call.rows[n] != rows for n in (source, index)):
        return None
    return PartResult(rows, {n: rows for n in (source, index) if n not in call.rows})


def _scatter(call: PartCall) -> PartResult | None:
    """Each row has its own indices along another dimension."""
    given = [call.argument(name) for name in ("self", "index", "src")]
    tensors = [node for node in given if isinstance(node, fx.Node)]
    found = {call.rows[node] for node in tensors if node in call.rows}
    if len(found) != 1:
        return None
    (rows,) = found
    if call.argument("dim") % len(call.shape) in rows.dims:
        return None
    if any(shape_of(node)[dim] != call.shape[dim] for node in tensors for dim in rows.dims):
        return None
    return PartResult(rows, {node: rows for node in tensors if node not in call.rows})


def _t(call: PartCall, ndim: int) -> Sequence[int]:
    del call
    return list(reversed(range(ndim)))


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::reshape"), _view),
    **dict.fromkeys(("aten::detach", "aten::alias"), _same),
    **dict.fromkeys(("aten::clone", "aten::_to_copy"), _pointwise),
    **dict.fromkeys(("aten::masked_fill", "aten::where", "aten::tanh_backward"), _pointwise),
    **dict.fromkeys(("aten::gelu_backward", "aten::silu_backward"), _pointwise),
    **dict.fromkeys(("aten::threshold_backward", "aten::sigmoid_backward"), _pointwise),
    **dict.fromkeys(("aten::expand", "aten::fill", "aten::empty_like"), _pointwise),
    **dict.fromkeys(("aten::ones_like", "aten::zeros_like", "aten::full_like"), _pointwise),
    **dict.fromkeys(("aten::slice", "aten::slice_backward"), _slice),
    **dict.fromkeys(("aten::split", "aten::split_with_sizes"), _pieces),
    **dict.fromkeys(("aten::unbind", "aten::select"), _taken_apart),
    "aten::cat": _along("dim"),
    "aten::stack": _stack,
    "aten::unsqueeze": _unsqueeze,
    "aten::squeeze": _squeeze,
    "aten::t": _permuted(_t),
    "aten::transpose": _permuted(_swapped),
    "aten::permute": _permuted(_permutation),
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), _along("dim")),
    "aten::_softmax_backward_data": _along("dim"),
    "aten::_log_softmax_backward_data": _along("dim"),
    **dict.fromkeys(
        ("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::logsumexp"), _reduction
    ),
    "aten::mm": _letters({"self": "mk", "mat2": "kn"}, "mn"),
    "aten::bmm": _letters({"self": "bmk", "mat2": "bkn"}, "bmn"),
    "aten::addmm": _addmm,
    "aten::embedding": _embedding,
    "aten::gather": _gather,
    "aten::scatter": _scatter,
    **LAYER_RULES,
}
