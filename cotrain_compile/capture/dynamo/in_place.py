"""In-place operators: after `p -= change` the name `p` is still what it was.

Stock Dynamo gives it a new variable, which stands for no tensor of the user's. What is assigned to
that one's attributes is lost: `p -= lr * p.grad; p.grad = None` leaves the gradient.

Private torch API used: `BuiltinVariable.call_function`. Reason: there is no public way to change
how an operator is traced. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable

_OPERATORS = frozenset(
    {
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
        *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
    }
)
# An operation may make a leaf a result of the graph, which is then another variable.
_SAME = ("dtype", "ndim", "requires_grad", "has_grad_fn")


def in_place_traced() -> AbstractContextManager[Any]:
    """Within it, an in-place operator on an input of the step returns the input."""
    traced = _returning_what_it_writes(BuiltinVariable.call_function)
    return mock.patch.object(BuiltinVariable, "call_function", traced)


def _returning_what_it_writes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> Any:
        result = original(self, tx, args, kwargs)
        if self.fn in _OPERATORS and isinstance(result, TensorVariable):
            written = args[0].realize()
            if isinstance(written, TensorVariable) and written.source and _alike(written, result):
                return written
        return result

    return call


def _alike(written: TensorVariable, result: TensorVariable) -> bool:
    return all(getattr(written, name) == getattr(result, name) for name in _SAME)
