"""List ops: ops that are alike as one call for many tensors, where that leaves the same bits.

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
from itertools import repeat
from typing import Any

import torch
from torch import fx

from cotrain_compile.runtime.bound_ops import directly

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
