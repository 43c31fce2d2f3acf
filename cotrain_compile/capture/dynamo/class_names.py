"""Names of classes: the class of a parameter has a name and a module, as any other class has.

In: what reads an attribute in a trace. Out: a constant, where it is a name of a class that Dynamo
puts into graphs as a function, such as `nn.Parameter`. PEFT asks `type(weight).__module__` whether
a weight is quantized. Another class fails the guards on the weight itself.

Private torch API used: `GetAttrBuiltinVariable.call_function`, in torch 2.11 `BuiltinVariable`'s,
and `BaseTorchVariable`. Reason: of an attribute of such a class Dynamo knows no value. Tried on
torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.torch import BaseTorchVariable

Patch = tuple[Any, str, Any]

# What traces `getattr` has a class of its own from some torch between 2.11 and 2.13 on.
_GETATTR: Any = getattr(builtin, "GetAttrBuiltinVariable", builtin.BuiltinVariable)
_NAMES = {"__module__", "__name__", "__qualname__"}


def class_names_traced() -> Iterator[Patch]:
    """What is replaced so that names of classes are constants of a trace."""
    yield _GETATTR, "call_function", _knowing_names(_GETATTR.call_function)


def _knowing_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get(self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> Any:
        asks = self.as_python_constant() is getattr
        known = _name_of_class(*args[:2]) if asks else None
        return original(self, tx, args, kwargs) if known is None else known

    return get


def _name_of_class(owner: VariableTracker, name: VariableTracker) -> VariableTracker | None:
    """What `owner.name` is, if that is a name of a class of torch's."""
    if not isinstance(owner, BaseTorchVariable) or not inspect.isclass(owner.value):
        return None
    if not name.is_python_constant() or name.as_python_constant() not in _NAMES:
        return None
    known: VariableTracker = ConstantVariable.create(
        getattr(owner.value, name.as_python_constant())
    )
    return known
