"""Names of classes: the class of a parameter has a name and a module, as any other class has.

In: what reads an attribute in a trace. Out: a constant, where it is a name of a class that Dynamo
puts into graphs as a function, such as `nn.Parameter`. PEFT asks `type(weight).__module__` whether
a weight is quantized. Another class fails the guards on the weight itself.

Private torch API used: `GetAttrBuiltinVariable.call_function`, `BaseTorchVariable`. Reason: of an
attribute of such a class Dynamo knows no value. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import GetAttrBuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.torch import BaseTorchVariable

Patch = tuple[Any, str, Any]

_NAMES = {"__module__", "__name__", "__qualname__"}


def class_names_traced() -> Iterator[Patch]:
    """What is replaced so that names of classes are constants of a trace."""
    known = _knowing_names(GetAttrBuiltinVariable.call_function)
    yield GetAttrBuiltinVariable, "call_function", known


def _knowing_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get(self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> Any:
        owner, name = args[0], args[1]
        if (
            isinstance(owner, BaseTorchVariable)
            and inspect.isclass(owner.value)
            and name.is_python_constant()
            and name.as_python_constant() in _NAMES
        ):
            return ConstantVariable.create(getattr(owner.value, name.as_python_constant()))
        return original(self, tx, args, kwargs)

    return get
