"""Attention: what runs in parts of sequences with a fused kernel and its backward.

    %q, %k, %v = %x @ the weights, %attention(%q, %k, %v)
    %dq, %dk, %dv = %attention_backward(...), %dx = the sum of these @ the weights

The kernel holds no scores, yet reads three values as wide as the model, and its backward makes the
gradients of all three beside them. None of these is wider than what leaves: wide is here what lies
between the kernels and the products. With dropout a part would draw other numbers, and one sequence
has no parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from cotrain_compile.extract.regions.calls import shape_of
from cotrain_compile.extract.regions.grow import Grown, grow, leaves
from cotrain_compile.extract.regions.halves import Halves
from cotrain_compile.extract.regions.layer_rules import ATTENTION, ATTENTION_BACKWARD
from cotrain_compile.extract.regions.rows import Rows, rows_from
from cotrain_compile.extract.regions.starts import MATRIX_PRODUCTS, NEAR, elements
from cotrain_compile.graph import StepGraph


def kernels(step: StepGraph, halves: Halves) -> list[fx.Node]:
    """The calls of a fused kernel in a forward."""
    return [node for node in step.nodes if _calls(node, ATTENTION) and halves.is_forward(node)]


def is_kernel(node: fx.Node) -> bool:
    """Whether it is a call of a fused kernel, or of its backward."""
    return _calls(node, ATTENTION) or _calls(node, ATTENTION_BACKWARD)


def around_kernel(
    halves: Halves, nodes: Sequence[fx.Node], at: Mapping[fx.Node, int], kernel: fx.Node
) -> Grown | None:
    """What runs in parts of sequences with `kernel`, and with its backward where it has one."""
    length = int(shape_of(kernel)[0])
    ahead = _from_products(nodes[max(0, at[kernel] - NEAR) : at[kernel]], kernel)
    products = [node for node in ahead if node.target in MATRIX_PRODUCTS]
    starts = {node: rows for node in products if (rows := rows_from(shape_of(node), 0, length))}
    readers = {user for item in kernel.users for user in item.users}
    backward = [node for node in readers if _calls(node, ATTENTION_BACKWARD)]
    if length < 2 or len(backward) > 1 or set(starts.values()) != {Rows(0, 0)}:
        return None
    least = min(filter(None, map(elements, ahead)))
    behind = _up_to_products(backward[0], least) if backward else []
    is_wide = {*ahead, *behind}.__contains__

    until = at[kernel] + 1 + len(kernel.users)
    forward = halves.beside(kernel, nodes[at[products[0]] : until])
    grown = grow(forward, starts, is_wide, Grown(length))
    if backward:
        until = max(at[node] for node in behind) + NEAR
        back = list(filter(halves.is_backward, nodes[at[backward[0]] : until]))
        grown = grow(back, {}, is_wide, grown)
    if not {kernel, *backward} <= set(grown.ops) or grown.unread:
        return None
    return None if any(leaves(node, grown) for node in filter(is_wide, grown.rows)) else grown


def _from_products(nodes: Sequence[fx.Node], kernel: fx.Node) -> list[fx.Node]:
    """Those of `nodes` that lead from products to what `kernel` reads, and these products."""
    follows = set[fx.Node]()
    for node in nodes:
        if node.target in MATRIX_PRODUCTS or not follows.isdisjoint(node.all_input_nodes):
            follows.add(node)
    leads = {node for node in kernel.all_input_nodes if node in follows}
    for node in reversed(nodes):
        if node in leads and node.target not in MATRIX_PRODUCTS:
            leads.update(source for source in node.all_input_nodes if source in follows)
    return [node for node in nodes if node in leads]


def _up_to_products(kernel: fx.Node, least: int) -> list[fx.Node]:
    """`kernel`, and what of at least so many elements follows from it before any product."""
    found = {kernel: None}
    queue = list(kernel.users)
    for node in queue:  # grows while it is read
        is_wide = elements(node) >= least or isinstance(node.meta.get("val"), list | tuple)
        if node not in found and node.target not in MATRIX_PRODUCTS and is_wide:
            found[node] = None
            queue += node.users
    return list(found)


def _calls(node: fx.Node, names: Mapping[str, object]) -> bool:
    return getattr(getattr(node.target, "_schema", None), "name", "") in names
