"""Bound ops: what a node of a graph computes, as a function of the values of nodes.

In: a node that calls a function. Out: a function of a mapping from nodes to values. Where values
come from and what is constant is looked up once; to run it then takes what the op itself takes, and
a fifth of a microsecond.

Private torch API used: `OpOverload._op`, which its `__call__` calls, and the `impl_aten` of a prim,
which its kernel calls after it has inferred the result once more. Reason: they take a third of a
small op's time, and two thirds of a prim's. Tried on torch 2.13.0.

List ops: ops that are alike as one call for many tensors, where that leaves the same bits.

In: nodes with the same target, constants and types. Out: a function of their arguments, each a list
with a tensor for every node or one constant for all. Where ATen has a `_foreach_*` op, that is
called: on the CPU it calls the op of one tensor for every tensor, with no Python in between. On a
card these are kernels of their own, whose rounding nobody promises.

Private torch API used: `torch._foreach_*`. Reason: there is no public name for these functional
forms. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat, takewhile
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


aten = torch.ops.aten

ListOp = Callable[..., Sequence[Any]]


def _subtract_from(tensors: Any, numbers: Any) -> Sequence[Any]:
    return torch._foreach_sub(numbers, tensors)


def _multiply_and_add(a: Any, b: Any, c: Any) -> Sequence[Any]:
    """`prims.fma` as ATen's kernels run it: both ops round."""
    found = torch._foreach_mul(a, b)
    torch._foreach_add_(found, c)
    return found


def _copy(to: Any, source: Any, non_blocking: bool = False) -> Sequence[Any]:
    torch._foreach_copy_(to, source, non_blocking)
    return to  # type: ignore[no-any-return]


_FOREACH: Mapping[str, ListOp] = {
    "aten.add.Tensor": torch._foreach_add,
    "aten.sub.Tensor": torch._foreach_sub,
    "aten.mul.Tensor": torch._foreach_mul,
    "aten.div.Tensor": torch._foreach_div,
    "aten.maximum.default": torch._foreach_maximum,
    "aten.lerp.Scalar": torch._foreach_lerp,
    "aten.pow.Scalar": torch._foreach_pow,
    "aten.pow.Tensor_Scalar": torch._foreach_pow,
    "aten.addcmul.default": torch._foreach_addcmul,
    "aten.addcdiv.default": torch._foreach_addcdiv,
    "aten.sqrt.default": torch._foreach_sqrt,
    "aten.neg.default": torch._foreach_neg,
    "aten.abs.default": torch._foreach_abs,
    "aten.sign.default": torch._foreach_sign,
    "aten.reciprocal.default": torch._foreach_reciprocal,
    "aten.copy_.default": _copy,
}
# The same for whole precision, where every argument is a list of tensors. A number is rounded to
# the type of the others once, by whomever, and as a tensor made once costs half of an op less. In
# half precision kernels take numbers as they are.
_OF_TENSORS: Mapping[str, ListOp] = {
    "aten.add.Tensor": torch._foreach_add,
    "aten.mul.Tensor": torch._foreach_mul,
    "aten.div.Tensor": torch._foreach_div,
    "aten.pow.Scalar": torch._foreach_pow,
    "aten.rsub.Scalar": _subtract_from,
    "prims.fma.default": _multiply_and_add,
}
_WHOLE_PRECISION = (torch.float32, torch.float64)


def copy_all(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    non_blocking: bool = False,
) -> None:
    """Copy each of `sources` over its destination, in their order where they are on two devices."""
    torch._foreach_copy_(list(destinations), list(sources), non_blocking)


def list_op(nodes: Sequence[fx.Node]) -> ListOp:
    """What `nodes` compute of their arguments; of copies the tensors that they write over."""
    first, target = nodes[0], str(nodes[0].target)
    is_node = [isinstance(argument, fx.Node) for argument in first.args]
    if target in _OF_TENSORS and not first.kwargs and all(map(_is_whole, nodes)):
        return _with_tensors(_OF_TENSORS[target], first, len(nodes))
    # Beside a number there is no list op with a factor.
    if target in _FOREACH and not (first.kwargs and not all(is_node[:2])):
        return partial(_FOREACH[target], **first.kwargs)
    one = partial(directly(first.target), **first.kwargs)
    if not any(is_node):  # what is made of constants alone is made anew for each
        return lambda *columns: [one(*columns) for _ in nodes]

    def one_by_one(*columns: Any) -> Sequence[Any]:
        each = (c if n else repeat(c) for c, n in zip(columns, is_node, strict=True))
        return list(map(one, *each))

    return one_by_one


def _is_whole(node: fx.Node) -> bool:
    """Whether all tensors have one type in whole precision, and the first the result's shape."""
    values = [node.meta["val"], *(value.meta["val"] for value in node.all_input_nodes)]
    same = {value.dtype for value in values} == {values[0].dtype}
    return same and values[0].dtype in _WHOLE_PRECISION and values[0].shape == values[1].shape


def _with_tensors(found: ListOp, node: fx.Node, count: int) -> ListOp:
    """`found`, given tensors in place of the numbers of `node`."""
    dtype = node.meta["val"].dtype
    numbers = {
        place: [torch.tensor(value, dtype=dtype, device="cpu")] * count
        for place, value in enumerate(node.args)
        if not isinstance(value, fx.Node)
    }
    if not numbers:
        return found
    return lambda *columns: found(*(numbers.get(p, c) for p, c in enumerate(columns)))
