"""Missing rules: what Dynamo does not trace, or not as eager has it, eight small ones.

Names of classes: the class of a parameter has a name and a module, as any other class has.

In: what reads an attribute in a trace. Out: a constant, where it is a name of a class that Dynamo
puts into graphs as a function, such as `nn.Parameter`. PEFT asks `type(weight).__module__` whether
a weight is quantized. Another class fails the guards on the weight itself.

Private torch API used: `GetAttrBuiltinVariable.call_function`, in torch 2.11 `BuiltinVariable`'s,
and `BaseTorchVariable`. Reason: of an attribute of such a class Dynamo knows no value. Tried on
torch 2.11.0 and 2.13.0.

Repeated arguments: a tensor may be given to `autograd.Function.apply` more than once.

In: the arguments of a call in a trace. Out: the same, with a view in place of each tensor that was
there before. Self-attention over packed sequences by FlashAttention's package does so: the starts
of queries are those of keys. Its gradient, where it has one, is the sum of those of its views.

Private torch API used: `AutogradFunctionApplyVariable.call_function` and the fake value of a traced
tensor, `proxy.node.meta["example_value"]`. Reason: Dynamo refuses such a call, since it finds the
gradients of arguments by the tensors. Tried on torch 2.13.0.

Methods of tensors in the trace, looked up by their names when they are called.

What replaces such a method replaces it in the class. From torch 2.14 on the trace calls what a
table of the class has held since the class was made, and would go past that.

Private torch API used: `TensorVariable.tp_methods`, `base.Method`. Reason: nothing public says what
a trace does with a method. Tried on torch 2.13.0, 2.14.1 and 2.15.0.

A `deque(maxlen=...)` of the user's in the trace: full, it drops an item for each it gets.

Dynamo reads such a deque as one without a bound. The deque itself came out right, but what the step
computed of it (`sum(losses) / len(losses)`) was of one item too many.

Private torch API used: `VariableBuilder.wrap_listlike`, `DequeVariable.maxlen`,
`SideEffects.codegen_update_mutated`. Reason: they read a deque, trace its methods and write it
back. Tried on torch 2.13.0.

What Dynamo of torch 2.11 traces otherwise than later ones: rules it lacks, and arithmetic.

It knows no type of `contextlib.nullcontext()`, which Hugging Face's `Trainer` asks for, nor whether
a list is empty by `bool`, which Accelerate does. And it makes of `p.add_(g, alpha=0.1)` a product
and a sum, of which each is rounded; eager's kernel rounds once.

Private torch API used: `NullContextVariable.python_type`, `BuiltinVariable.call_bool`,
`TensorVariable.method_add_`, `.method_addcmul_` and `.method_addcdiv_`. Reason: later torch has
these rules in the same places. Tried on torch 2.11.0.

In-place operators: after `p -= change` the name `p` is still what it was.

Stock Dynamo gives it a new variable, which stands for no tensor of the user's. What is assigned to
that one's attributes is lost: `p -= lr * p.grad; p.grad = None` leaves the gradient.

Private torch API used: `BuiltinVariable.call_function`. Reason: there is no public way to change
how an operator is traced. Tried on torch 2.13.0.

`torch.inference_mode` in a step: traced as the mode of gradients that it sets.

A captured step computes what eager does within it, and its results are ordinary tensors. Eager's
are inference tensors, which autograd refuses to save: a step that runs in eager runs here.

Dynamo puts the mode itself into its graph. There AOTAutograd fails at the first view of an input,
and the mode, which is left when the failed trace is freed, takes with it what the dispatcher knows
of that thread: every later op of the process fails.

Private torch API used: `InferenceModeVariable.create`, `TorchCtxManagerClassVariable`,
`GradModeVariable`, `VariableBuilder._wrap`. Reason: there is no switch for it. Tried on torch
2.13.0.

`torch.compile` in a step, which torchao's optimizers call: what it compiles is traced.

Dynamo knows it by the object that had the name when the first step was traced. Lightning puts one
of its own in its place, which calls torch's; whichever is not known could not be traced.

Private torch API used: `TorchInGraphFunctionVariable._get_handlers`. Reason: what a trace does with
a function of torch's is in that table alone. Tried on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import (
    GradModeVariable,
    InferenceModeVariable,
    NullContextVariable,
)
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.lists import BaseListVariable, DequeVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import (
    BaseTorchVariable,
    TorchCtxManagerClassVariable,
    TorchInGraphFunctionVariable,
)
from torch.torch_version import TorchVersion

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
    if not name.is_python_constant() or name.as_python_constant() not in _NAMES:
        return None
    if not isinstance(owner, BaseTorchVariable) or not inspect.isclass(owner.value):
        return None
    known: VariableTracker = ConstantVariable.create(
        getattr(owner.value, name.as_python_constant())
    )
    return known


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


# Those that are replaced while a step is traced.
_REPLACED = ("backward", "requires_grad_")


@contextmanager
def methods_by_name() -> Iterator[None]:
    """Within it, the trace calls what the class has under the name of each replaced method."""
    table: dict[str, Any] | None = getattr(TensorVariable, "tp_methods", None)
    if table is None:
        yield
        return
    with mock.patch.dict(table, {name: type(table[name])(_called(name)) for name in _REPLACED}):
        yield


def _called(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, f"method_{name}")(*args, **kwargs)

    return call


def deques_bounded() -> Iterator[Patch]:
    """What is replaced so that a trace knows how many items a deque holds at most."""
    if hasattr(VariableBuilder, "wrap_listlike") and hasattr(SideEffects, "codegen_update_mutated"):
        yield VariableBuilder, "wrap_listlike", _with_bound(VariableBuilder.wrap_listlike)
        write_back = _whole(SideEffects.codegen_update_mutated)
        yield SideEffects, "codegen_update_mutated", write_back


def _with_bound(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which makes a variable of a list or deque, with the bound of a deque."""

    @functools.wraps(original)
    def wrap(self: VariableBuilder, value: Any) -> Any:
        variable = original(self, value)
        if isinstance(value, deque) and value.maxlen is not None:
            variable.maxlen = ConstantVariable.create(value.maxlen)
        return variable

    return wrap


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which writes back what the step has changed, for deques with a bound, too.

    It refuses these, as it does not know what they dropped when. They are emptied, and get all that
    they hold at the end, which is no more than the bound.
    """

    @functools.wraps(original)
    def write_back(self: SideEffects, *args: Any, **kwargs: Any) -> Any:
        held = [v for v in self._get_modified_vars() if type(v) is DequeVariable]
        bounds = [(variable, variable.maxlen) for variable in held]
        for variable in held:
            variable.maxlen = ConstantVariable.create(None)
        try:
            return original(self, *args, **kwargs)
        finally:
            for variable, bound in bounds:
                variable.maxlen = bound

    return write_back


# By the name of what scales the operand that is added.
_SCALED_SUMS = {"method_add_": "alpha", "method_addcmul_": "value", "method_addcdiv_": "value"}


def rules_added() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced in a torch before 2.12: owner, name and what stands there instead."""
    if TorchVersion(torch.__version__) >= "2.12":
        return
    yield NullContextVariable, "python_type", lambda _: contextlib.nullcontext
    yield BuiltinVariable, "call_bool", _also_of_containers(BuiltinVariable.call_bool)
    for name, factor in _SCALED_SUMS.items():
        yield TensorVariable, name, _as_a_whole(getattr(TensorVariable, name), factor)


def _also_of_containers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_bool(self: Any, tx: Any, arg: VariableTracker) -> Any:
        if isinstance(arg, BaseListVariable | ConstDictVariable):
            return ConstantVariable.create(bool(arg.items))
        return original(self, tx, arg)

    return call_bool


def _as_a_whole(original: Callable[..., Any], factor: str) -> Callable[..., Any]:
    """`original`, a scaled sum, but as one op where the factor is a number of Python's."""

    @functools.wraps(original)
    def scaled_sum(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get(factor), ConstantVariable):
            return None  # no rule of its own: the call as it is
        return original(self, tx, *args, **kwargs)

    return scaled_sum


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


def inference_mode_traced() -> Iterator[Patch]:
    """What is replaced so that a trace knows the mode of gradients alone."""
    yield InferenceModeVariable, "create", staticmethod(_mode_of_gradients)
    called = TorchCtxManagerClassVariable.call_function
    yield TorchCtxManagerClassVariable, "call_function", _with_named_mode(called)
    yield VariableBuilder, "_wrap", _made_before(VariableBuilder._wrap)


def _mode_of_gradients(tx: Any, mode: Any, **options: Any) -> GradModeVariable:
    """`inference_mode(mode)`: on, it computes no gradients; off, it does, within `no_grad` too."""
    return GradModeVariable.create(tx, not mode, **options)


def _with_named_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which makes a context manager, for `inference_mode(mode=...)` too."""

    @functools.wraps(original)
    def call(self: TorchCtxManagerClassVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.inference_mode and kwargs.keys() == {"mode"}:
            args, kwargs = [kwargs["mode"]], {}
        return original(self, tx, args, kwargs)

    return call


def _made_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which makes a variable of what a step finds, for a mode made outside it."""

    @functools.wraps(original)
    def wrap(self: VariableBuilder, value: Any) -> VariableTracker:
        if type(value) is torch.inference_mode:
            self.install_guards(GuardBuilder.ID_MATCH)
            return _mode_of_gradients(self.tx, value.mode)
        variable: VariableTracker = original(self, value)
        return variable

    return wrap


@contextmanager
def compile_traced() -> Iterator[None]:
    """Within it `torch.compile` and what it wraps are one to a trace."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    names: list[Callable[..., Any]] = []
    each: Any = torch.compile
    while each is not None:
        names.append(each)
        each = getattr(each, "__wrapped__", None)
    known = next((handlers[name] for name in names if name in handlers), None)
    with mock.patch.dict(handlers, {} if known is None else dict.fromkeys(names, known)):
        yield
