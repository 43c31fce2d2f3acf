"""Find: the regions of a step, as a graph and as plain data.

In: a StepGraph. Out: a `FoundRegion` for each, with its `Region`. The loss of a language model is
one: its logits are wide, and what the backward reads of it is what the loss has made and a scalar,
so that each part runs forward and backward before the next begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cotrain_compile.dataflow import Phase
from cotrain_compile.extract.regions.attention import around_kernel, kernels
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
from cotrain_compile.extract.regions.told import FoundRegion, told
from cotrain_compile.graph import StepGraph

aten = torch.ops.aten
_LIKELIHOODS = frozenset({aten._log_softmax.default, aten.logsumexp.default})


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
    regions = (told(step, name, kind, each, buffer_of) for name, kind, each in _named(kinds))
    return tuple(each for each in regions if each is not None)


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
