"""Starts: the ops that regions may begin with, in which rows, and what such a region is.

A product, or a convolution, that makes more than it reads. There may be several ways to see its
result as rows: the first that gives enough of them is taken, else the one that gives most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.extract.regions.calls import shape_of
from cotrain_compile.extract.regions.rows import Rows, rows_from

aten = torch.ops.aten
MATRIX_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default)
_SHAPED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# What is as wide as the product that a region begins with, or nearly, as logits of shifted tokens.
# What leaves has at most half of that.
WIDE = 0.6
# What gives every part a row or more in as many parts as are worth while for most steps.
ENOUGH = 8
# Of experts: a part of them has its own weights, where one of their tokens has all.
FEW = 4
# What of a layer belongs together is no further apart, in nodes.
NEAR = 60
# A product that makes so many times what it reads begins a region.
_MORE = 2


def is_product(node: fx.Node) -> bool:
    """Whether it is a product or a convolution."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return node.target in MATRIX_PRODUCTS or name in (*_GROUPED, "aten::convolution")


def source_of(product: fx.Node) -> fx.Node:
    """The argument of a product whose rows are those of its result."""
    source = product.args[1 if product.target is aten.addmm.default else 0]
    assert isinstance(source, fx.Node)
    return source


def widens(product: fx.Node) -> bool:
    """Whether a product makes so much more than it reads that it is worth parts."""
    return elements(product) >= _MORE * elements(source_of(product))


def as_wide_as(product: fx.Node) -> Callable[[fx.Node], bool]:
    """Which values are wide ones: of nearly as many elements as the product that it begins with.

    Or as one of the pieces that it is cut into, where these still are more than what it reads: a
    gate and what goes through it.
    """
    viewed = [user for user in product.users if user.target in _SHAPED]
    cut = [u for n in (product, *viewed) for u in n.users if u.target in _CUTS]
    pieces = [shape_of(node) for node in cut]
    least = min((prod(map(int, shape)) for shape in pieces), default=0)
    return of_elements(
        WIDE * (least if WIDE * least > elements(source_of(product)) else elements(product))
    )


def of_elements(count: float) -> Callable[[fx.Node], bool]:
    """Whether a value has as many."""
    return lambda node: elements(node) >= count


def elements(node: fx.Node) -> int:
    """Of what a node makes; 0 where that is not one tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def rows_of(product: fx.Node) -> Iterator[tuple[Rows, int]]:
    """Rows that the result of a product may have, with their number.

    Those of its first dimension: tokens, or pairs of a sequence and a head. Then sequences alone.
    Of a batch of matrices the rows in each.
    """
    shape = shape_of(product)
    lengths = [shape[0]]
    for user in product.users:
        if user.target in _SHAPED and len(shape_of(user)) > 2 and shape_of(user)[0] < shape[0]:
            lengths.append(shape_of(user)[0])
    for length in dict.fromkeys(lengths):
        rows = rows_from(shape, 0, length) if length > 1 else None
        if rows is not None:
            yield rows, length
    if product.target is aten.bmm.default and shape[1] > 1:
        yield Rows(1, 1), shape[1]


def kind_of(product: fx.Node) -> str:
    """What a region around a product is in the model."""
    name = str(product.target._schema.name)  # type: ignore[union-attr]
    if name == "aten::convolution":
        return "convolution"
    if name in _GROUPED:
        return "experts"
    if product.target is not aten.bmm.default:
        return "mlp"
    weight: Any = product.args[1]
    return "experts" if taken_of(weight).op == "placeholder" else "attention"


def taken_of(node: fx.Node) -> fx.Node:
    """What `node` is a view or a copy of, or of a part of it."""
    while node.op == "call_function" and (is_view(node) or node.target in _CONVERTED):
        node = node.all_input_nodes[0]
    return node


_CONVERTED = frozenset({aten._to_copy.default, aten.clone.default})
