"""Dispatch: what a mixture of experts sends its tokens by, a mask of tokens, experts and room.

    %mask(tokens, experts, room), %mask^T @ %tokens, the experts, %mask @ what they make

as GShard, Switch and DeepSpeed write it. A part makes and reads the rows of the mask that its
tokens have, and the experts between run whole: so there is a window at each place where a product
reads the mask, in the forward and in the backward. What a product makes of all tokens is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.dataflow import Phase
from cotrain_compile.extract.regions.calls import PartCall, shape_of
from cotrain_compile.extract.regions.grow import Grown, IsWide, Starts, grow, leaves
from cotrain_compile.extract.regions.rows import Rows
from cotrain_compile.extract.regions.rules import outcome_of
from cotrain_compile.extract.regions.starts import NEAR, WIDE, elements, is_product, of_elements
from cotrain_compile.graph import StepGraph

# A mask has so many times what it is made of.
_MORE = 2
_DIMS = 3


def masks(step: StepGraph) -> Iterator[fx.Node]:
    """The ops of the forward that make something like a mask, of narrower things."""
    for node in step.nodes:
        if _is_forward(step, node) and _is_outer(node) and len(shape_of(node)) >= _DIMS:
            yield node


def _is_outer(node: fx.Node) -> bool:
    """Whether it is an outer product: element by element, or a product that adds nothing up."""
    is_bmm = node.target is torch.ops.aten.bmm.default
    if not is_bmm and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    given, made = node.all_input_nodes, elements(node)
    return len(given) > 1 and made > 0 and all(made >= _MORE * elements(n) for n in given)


def around_mask(
    step: StepGraph, nodes: Sequence[fx.Node], at: Mapping[fx.Node, int], mask: fx.Node
) -> Grown | None:
    """What runs in parts of tokens with `mask`; None where nothing is sent by it."""
    wide, none = of_elements(WIDE * elements(mask)), Grown(shape_of(mask)[0])
    ahead = [n for n in nodes[at[mask] : at[mask] + NEAR] if _is_forward(step, n)]
    grown = _next_window(ahead, {mask: Rows(0, 0)}, wide, none)
    if not any(map(is_product, grown.sums)):
        return None
    grown = _with_readers(nodes, at, grown, wide, lambda node: _is_forward(step, node))
    forward = len(grown.windows)
    grown = _with_readers(nodes, at, grown, wide, lambda node: _is_backward(step, node))
    wide_ones = (node for node in grown.rows if wide(node))
    if len(grown.windows) == forward or grown.unread or any(leaves(n, grown) for n in wide_ones):
        return None
    return grown


def _with_readers(
    nodes: Sequence[fx.Node],
    at: Mapping[fx.Node, int],
    grown: Grown,
    wide: IsWide,
    is_among: Callable[[fx.Node], bool],
) -> Grown:
    """`grown` with a window for each place where nodes read what it has, behind its last op."""
    while True:
        last = at[grown.ops[-1]]
        readers = (at[user] for node in grown.rows for user in node.users if user in at)
        places = [place for place in readers if place > last and is_among(nodes[place])]
        if not places:
            return grown
        begin = max(last + 1, min(places) - NEAR)
        among = [node for node in nodes[begin : max(places) + NEAR] if is_among(node)]
        found = _next_window(among, {}, wide, grown)
        if not found.windows[-1]:
            return grown
        grown = found


def _next_window(nodes: Sequence[fx.Node], starts: Starts, wide: IsWide, before: Grown) -> Grown:
    """`before` with a window more, up to the first product that is a sum over all tokens.

    What follows from that runs whole; what comes behind it and does not, in the next window, so
    that no part of it waits for the experts.
    """
    found = grow(nodes, starts, wide, before)
    found = grow(nodes, {**starts, **_products_of_same_rows(nodes, found, wide)}, wide, before)
    sums = [node for node in found.sums - before.sums if is_product(node)]
    if not sums or min(sums) is found.ops[-1]:
        return found
    return _next_window(nodes[: nodes.index(min(sums)) + 1], starts, wide, before)


def _products_of_same_rows(nodes: Sequence[fx.Node], grown: Grown, wide: IsWide) -> Starts:
    """The products that make something wide of values whose rows parts need already."""
    found: dict[fx.Node, Rows] = {}
    for node in nodes:
        if node in grown.rows or not is_product(node) or not wide(node):
            continue
        own = {n: grown.needs[n] for n in node.all_input_nodes if n in grown.needs}
        outcome = outcome_of(PartCall(node, own, grown.length)) if own else None
        if outcome is not None and isinstance(outcome.made, Rows):
            found[node] = outcome.made
    return found


def _is_forward(step: StepGraph, node: fx.Node) -> bool:
    return step.phases.get(node.name, Phase.FORWARD) is Phase.FORWARD


def _is_backward(step: StepGraph, node: fx.Node) -> bool:
    return step.phases.get(node.name) is Phase.BACKWARD or is_view(node)
