"""Numbers that change, given to ops of libraries: inputs of these ops, and not constants.

An op whose schema has an `int` or `float` takes a number of the trace for what it is at the moment:
a count of steps or a rate that an optimizer gives to its kernel would be compiled anew for each
value. In: a call of such an op in Dynamo's trace. Out: a call of its twin, which takes the same but
for those arguments, a whole number as `SymInt` and a fraction as a tensor of one float64, which
float inputs are in the graph (`aten.scalars`), and calls the op.

An op has a twin where it writes into its arguments and returns nothing, so that no shape follows
from the number, and where no derivative goes through it. One of ATen's has none: what a number in
it costs is known (`scalars`).

Private torch API used: `TorchInGraphFunctionVariable.call_function`, `SymNodeVariable`. Reason:
torch looks at the number as soon as Dynamo has the op's fake kernel run. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._ops import OpOverload, OpOverloadPacket

_NAMESPACE = "cotrain_numbers"
_OF_TORCH = {"aten", "prims", "prim", _NAMESPACE}
# By the type in the schema that an op takes a number as.
_WHOLE, _FRACTION = "int", "float"

Patch = tuple[Any, str, Any]


def numbers_traced() -> Iterator[Patch]:
    """What is replaced so that a number that changes stays an input of the op that takes it."""
    original = TorchInGraphFunctionVariable.call_function

    @functools.wraps(original)
    def call(
        self: Any, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        found = _of_twin(tx, self.value, args, kwargs)
        if found is None:
            return original(self, tx, args, kwargs)
        twin, given = found
        return original(TorchInGraphFunctionVariable(twin), tx, [], given)

    yield TorchInGraphFunctionVariable, "call_function", call


def _of_twin(
    tx: Any, called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpOverload[..., Any], dict[str, Any]] | None:
    """The twin for a call of `called`, and its arguments; None where the op itself will do."""
    op = _only_overload(called)
    if op is None or op.namespace in _OF_TORCH or op._schema.returns:
        return None
    arguments = op._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    given = {name: value.realize() for name, value in given.items()}
    changing = tuple(
        argument.name
        for argument in arguments
        if isinstance(given.get(argument.name), SymNodeVariable)
        and str(argument.type) in (_WHOLE, _FRACTION)
    )
    if not changing or _needs_derivative(given.values()):
        return None
    for argument in arguments:
        if argument.name in changing and str(argument.type) == _FRACTION:
            given[argument.name] = _as_tensor(tx, given[argument.name])
    return twin_of(op, changing), given


def _only_overload(called: Any) -> OpOverload[..., Any] | None:
    if isinstance(called, OpOverloadPacket):
        names = called.overloads()
        called = getattr(called, names[0]) if len(names) == 1 else None
    return called if isinstance(called, OpOverload) else None


def _needs_derivative(given: Iterable[Any]) -> bool:
    tensors = [value for value in given if isinstance(value, TensorVariable)]
    return torch.is_grad_enabled() and any(value.requires_grad for value in tensors)


def _as_tensor(tx: Any, number: VariableTracker) -> VariableTracker:
    make = TorchInGraphFunctionVariable(torch.scalar_tensor)
    dtype = VariableTracker.build(tx, torch.float64)
    return make.call_function(tx, [number], {"dtype": dtype})


@functools.cache
def twin_of(op: OpOverload[..., Any], changing: tuple[str, ...]) -> OpOverload[..., Any]:
    """The op that does what `op` does and takes the arguments `changing` as inputs of the graph.

    Its name is the same in every process.
    """
    name = "_".join((op.namespace, op.__name__.replace(".", "_"), "by", *changing))
    taken = str(op._schema).partition("(")[2]
    for number in changing:
        taken = re.sub(rf"\bint {number}\b", f"SymInt {number}", taken)
        taken = re.sub(rf"\bfloat {number}=[^,)]*", f"Tensor? {number}=None", taken)
        taken = re.sub(rf"\bfloat {number}\b", f"Tensor {number}", taken)
    _library().define(f"{name}({taken}")
    _library().impl(name, _calling(op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", lambda *_, **__: None, lib=_library())
    twin: OpOverload[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return twin


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(_NAMESPACE, "DEF")


def _calling(op: OpOverload[..., Any]) -> Callable[..., None]:
    fractions = {a.name for a in op._schema.arguments if str(a.type) == _FRACTION}
    names = [argument.name for argument in op._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        op(**{name: _number(v) if name in fractions else v for name, v in given.items()})

    return call


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
