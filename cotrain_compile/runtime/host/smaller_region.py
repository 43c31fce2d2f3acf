"""Smaller region: what a host region does, on tensors of some thousand elements.

In: a region. Out: the same ops on tensors that are laid out alike, with fewer elements: whether
two kernels of a kind agree then takes some MiB, whatever the parameters take. Each large size has a
small one in its place, in the shapes of inputs and where ops name it. Every result is looked at: it
has the small sizes for what the region has there, or the region has no smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

# Of the largest tensor, about: many times what the vectors of a loop hold.
MOST_ELEMENTS = 1 << 16

Shape = tuple[int, ...]


def smaller_region(region: fx.GraphModule) -> fx.GraphModule | None:
    """`region` on tensors of at most about `MOST_ELEMENTS`; itself where none has more.

    None where its ops do not go by the sizes of their inputs, as one that names a place in a
    bucket. It is run once to find out.
    """
    inputs = [node.meta.get("val") for node in region.graph.find_nodes(op="placeholder")]
    shapes = [_shape(value) for value in inputs if isinstance(value, Tensor)]
    if all(math.prod(shape) <= MOST_ELEMENTS for shape in shapes):
        return region
    sizes = _small_sizes(shapes)
    made = fx.GraphModule(region, _with_sizes(region.graph, sizes))
    olds = dict(zip(made.graph.nodes, region.graph.nodes, strict=True))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _Compared(made, olds, sizes).run(
                *(_like(v, sizes) if isinstance(v, Tensor) else v for v in inputs)
            )
    except (RuntimeError, _Differs):  # torch has no such op for other sizes
        return None
    return made


class _Differs(Exception):
    """A result has other sizes, or lies otherwise."""


class _Compared(fx.Interpreter):
    """Runs ops on few elements, and notes on their nodes what comes out."""

    def __init__(
        self, module: fx.GraphModule, olds: Mapping[fx.Node, fx.Node], small: Mapping[int, int]
    ) -> None:
        super().__init__(module)
        self._olds, self._small = olds, small

    def run_node(self, n: fx.Node) -> Any:
        """Raises `_Differs`."""
        result = super().run_node(n)
        if n.op != "output":
            if not _are_alike(self._olds[n].meta.get("val"), result, self._small):
                raise _Differs
            n.meta = {**self._olds[n].meta, "val": pytree.tree_map_only(Tensor, _described, result)}
        return result


def _described(value: Tensor) -> Tensor:
    return value.to("meta")


def _small_sizes(shapes: Iterable[Shape]) -> dict[int, int]:
    """For each large size another one, so that sizes that differ still do."""
    shapes = list(shapes)
    side = MOST_ELEMENTS
    while any(math.prod(min(size, side) for size in shape) > MOST_ELEMENTS for shape in shapes):
        side //= 2
    large = sorted({size for shape in shapes for size in shape if size > side}, reverse=True)
    small = {size: side - place for place, size in enumerate(large)}
    # What lies in one row, and what is made a row of.
    ranked = [shape for shape in shapes if len(shape) > 1]
    sides = {size for shape in ranked for size in shape}
    rows = {math.prod(shape): math.prod(_in_small(shape, small)) for shape in ranked}
    return small | {size: own for size, own in rows.items() if size not in sides}


def _in_small(shape: Iterable[int], small: Mapping[int, int]) -> Shape:
    return tuple(small.get(size, size) for size in shape)


def _shape(value: Tensor) -> Shape:
    return tuple(int(size) for size in value.shape)


def _with_sizes(graph: fx.Graph, small: Mapping[int, int]) -> fx.Graph:
    """A copy, whose ops name the small sizes."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = copies[node] = made.node_copy(node, copies.__getitem__)
        if isinstance(node.target, torch._ops.OpOverload):
            named = zip(node.target._schema.arguments, new.args, strict=False)
            new.args = tuple(_with_small(argument, value, small) for argument, value in named)
    return made


def _with_small(argument: torch.Argument, value: Any, small: Mapping[int, int]) -> Any:
    """What an op gets for `argument`: of a list of sizes that are known, the small ones."""
    if not isinstance(argument.type, torch.ListType) or "size" not in argument.name:
        return value
    are_known = all(isinstance(size, int) for size in value)
    return list(_in_small(value, small)) if are_known else value


def _like(value: Tensor, small: Mapping[int, int]) -> Tensor:
    """A tensor of small sizes, whose dimensions lie in memory in the same order."""
    shape = _in_small(_shape(value), small)
    strides_of = value.stride()
    strides, elements = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (int(strides_of[dim]), -dim)):
        strides[dim], elements = elements, elements * shape[dim]
    return torch.empty_strided(shape, strides, dtype=value.dtype).zero_()


def _are_alike(old: Any, new: Any, small: Mapping[int, int]) -> bool:
    """Whether all tensors in `new` are those in `old`, with small sizes."""
    pairs = zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True)
    return all(_is_alike(a, b, small) for a, b in pairs if isinstance(a, Tensor))


def _is_alike(old: Tensor, new: Tensor, small: Mapping[int, int]) -> bool:
    shape = _shape(old)
    return (
        _shape(new) == _in_small(shape, small)
        and (new.dtype, new.is_contiguous()) == (old.dtype, old.is_contiguous())
        and _order(new) == _order(old)
    )


def _order(value: Tensor) -> list[int]:
    """How the dimensions of more than one element lie in memory."""
    strides = [int(s) for s, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    ranks = sorted(set(strides))
    return [ranks.index(stride) for stride in strides]
