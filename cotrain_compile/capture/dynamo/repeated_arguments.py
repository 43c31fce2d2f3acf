"""Repeated arguments: a tensor may be given to `autograd.Function.apply` more than once.

In: the arguments of a call in a trace. Out: the same, with a view in place of each tensor that was
there before. Self-attention over packed sequences by FlashAttention's package does so: the starts
of queries are those of keys. Its gradient, where it has one, is the sum of those of its views.

Private torch API used: `AutogradFunctionApplyVariable.call_function` and the fake value of a traced
tensor, `proxy.node.meta["example_value"]`. Reason: Dynamo refuses such a call, since it finds the
gradients of arguments by the tensors. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable

Patch = tuple[Any, str, Any]


def repeated_arguments_traced() -> Iterator[Patch]:
    """What is replaced so that a function is traced which gets a tensor twice."""
    once = _each_once(AutogradFunctionApplyVariable.call_function)
    yield AutogradFunctionApplyVariable, "call_function", once


def _each_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> Any:
        seen: set[int] = set()
        given = []
        for arg in args:
            if arg.is_tensor():
                value = id(_fake_value(arg))
                if value in seen:
                    arg = arg.call_method(tx, "view_as", [arg], {})
                seen.add(value)
            given.append(arg)
        return original(self, tx, given, kwargs)

    return call


def _fake_value(tensor: Any) -> Any:
    return tensor.proxy.node.meta["example_value"]
