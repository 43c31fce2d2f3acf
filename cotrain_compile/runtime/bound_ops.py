"""Bound ops: what a node of a graph computes, as a function of the values of nodes.

In: a node that calls a function. Out: a function of a mapping from nodes to values. Where values
come from and what is constant is looked up once; to run it then takes what the op itself takes, and
a fifth of a microsecond.

Private torch API used: `OpOverload._op`, which its `__call__` calls, and the `impl_aten` of a prim,
which its kernel calls after it has inferred the result once more. Reason: they take a third of a
small op's time, and two thirds of a prim's. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import Any

import torch
from torch import fx

Values = Mapping[fx.Node, Any]
Bound = Callable[[Values], Any]


def bound(node: fx.Node) -> Bound:
    """What `node` computes."""
    op, first = directly(node.target), _first_nodes(node.args)
    others = node.args[len(first) :]
    if _nodes_in((others, node.kwargs)):
        return _taking(op, node)
    return _of_first(partial(op, **node.kwargs) if node.kwargs else op, first, others)


def directly(target: Any) -> Callable[..., Any]:
    """What `target` does, without what it does around that."""
    op = target._op if type(target) is torch._ops.OpOverload else target
    found: Callable[..., Any] = getattr(target, "impl_aten", op)
    return found


def _first_nodes(arguments: Sequence[Any]) -> Sequence[fx.Node]:
    """The nodes among the arguments before the first that is none."""
    return [*takewhile(lambda value: isinstance(value, fx.Node), arguments)]


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _of_first(op: Callable[..., Any], nodes: Sequence[fx.Node], others: Sequence[Any]) -> Bound:
    """`op` of some nodes, and behind them of constants: nearly all ops.

    One and two nodes are written out, since a tuple of them would take as long as the rest.
    """
    match nodes:
        case []:
            return lambda values: op(*others)
        case [a]:
            return lambda values: op(values[a], *others)
        case [a, b]:
            return lambda values: op(values[a], values[b], *others)
    take = itemgetter(*nodes)
    return lambda values: op(*take(values), *others)


def _taking(op: Callable[..., Any], node: fx.Node) -> Bound:
    """`op` of nodes and constants in any order, and in containers."""
    takes = [_taken(value) for value in node.args]
    named = {name: _taken(value) for name, value in node.kwargs.items()}

    def run(values: Values) -> Any:
        keywords = {name: take(values) for name, take in named.items()}
        return op(*[take(values) for take in takes], **keywords)

    return run


def _taken(value: Any) -> Bound:
    """An argument from the values of nodes."""
    if isinstance(value, fx.Node):
        return itemgetter(value)
    if not _nodes_in(value):
        return lambda values: value
    if isinstance(value, list | tuple):
        takes = [_taken(item) for item in value]
        container = list if isinstance(value, list) else tuple
        return lambda values: container(take(values) for take in takes)
    return lambda values: fx.node.map_arg(value, values.__getitem__)
