"""What Dynamo of torch 2.11 traces otherwise than later ones: rules it lacks, and arithmetic.

It knows no type of `contextlib.nullcontext()`, which Hugging Face's `Trainer` asks for, nor whether
a list is empty by `bool`, which Accelerate does. And it makes of `p.add_(g, alpha=0.1)` a product
and a sum, of which each is rounded; eager's kernel rounds once.

Private torch API used: `NullContextVariable.python_type`, `BuiltinVariable.call_bool`,
`TensorVariable.method_add_`, `.method_addcmul_` and `.method_addcdiv_`. Reason: later torch has
these rules in the same places. Tried on torch 2.11.0.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import NullContextVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.torch_version import TorchVersion

# By the name of what scales the operand that is added.
_SCALED_SUMS = {"method_add_": "alpha", "method_addcmul_": "value", "method_addcdiv_": "value"}


def rules_added() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced in a torch before 2.12: owner, name and what stands there instead."""
    if TorchVersion(torch.__version__) >= "2.12":
        return
    yield NullContextVariable, "python_type", lambda _: contextlib.nullcontext
    yield BuiltinVariable, "call_bool", _also_of_containers(BuiltinVariable.call_bool)
    for name, factor in _SCALED_SUMS.items():
        yield TensorVariable, name, _whole(getattr(TensorVariable, name), factor)


def _also_of_containers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_bool(self: Any, tx: Any, arg: VariableTracker) -> Any:
        if isinstance(arg, BaseListVariable | ConstDictVariable):
            return ConstantVariable.create(bool(arg.items))
        return original(self, tx, arg)

    return call_bool


def _whole(original: Callable[..., Any], factor: str) -> Callable[..., Any]:
    """`original`, a scaled sum, but as one op where the factor is a number of Python's."""

    @functools.wraps(original)
    def scaled_sum(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get(factor), ConstantVariable):
            return None  # no rule of its own: the call as it is
        return original(self, tx, *args, **kwargs)

    return scaled_sum
