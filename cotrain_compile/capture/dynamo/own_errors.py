"""Errors of the step's own: what a step raises while it is traced comes out as what it is.

In: an exception that nobody in the step catches, as Dynamo has seen it raised. Out: that exception.
What Dynamo calls code that it cannot trace though eager would raise an exception there, such as a
name that is nowhere, is raised in the trace, so that a step may catch it as well.

Private torch API used: `InstructionTranslatorBase.exception_handler`, `._load_attr` and
`.exn_vt_stack`; `symbolic_convert.unimplemented`, `._detect_and_normalize_assert_statement`;
`SkipFunctionVariable.call_function`; the variables of exceptions and `raise_observed_exception`.
Reason: Dynamo tells such an exception from what it cannot trace only by words. Tried on torch
2.13.0.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch._dynamo import exc, symbolic_convert
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import SuperVariable
from torch._dynamo.variables.user_defined import UserDefinedExceptionObjectVariable

from cotrain_compile.capture.dynamo.session import Session

Patch = tuple[Any, str, Any]

_ASSERT = "_detect_and_normalize_assert_statement"
_NO_MESSAGE = "assertion error"  # what Dynamo gives an assert that has none

_NAME = re.compile(r"name `(\w+)`")
_FUNCTION = re.compile(r"function (\S+?)\.?$")


def errors_noted(session: Session) -> Iterator[Patch]:
    """What is replaced so that `session` learns of an exception that nobody in the step catches."""
    handle = InstructionTranslatorBase.exception_handler
    yield InstructionTranslatorBase, "exception_handler", _noted(session, handle)
    if hasattr(InstructionTranslatorBase, "_load_attr"):
        named = _with_message(InstructionTranslatorBase._load_attr)
        yield InstructionTranslatorBase, "_load_attr", named
    if hasattr(UserDefinedExceptionObjectVariable, "exc_vt"):
        yield SuperVariable, "call_method", _set_up(SuperVariable.call_method)
    message = [""]
    if hasattr(symbolic_convert, _ASSERT):
        yield symbolic_convert, _ASSERT, _kept(message, getattr(symbolic_convert, _ASSERT))
    refuse: Any = vars(symbolic_convert)["unimplemented"]
    yield symbolic_convert, "unimplemented", _raised(message, refuse)
    yield SkipFunctionVariable, "call_function", _leaving(SkipFunctionVariable.call_function)


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a call that Dynamo does not trace, but for `sys.exit`, which raises."""

    @functools.wraps(original)
    def call(self: SkipFunctionVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is sys.exit:
            leave: Any = SystemExit
            raise_observed_exception(leave, tx, args=list(args))
        return original(self, tx, args, kwargs)

    return call


def _noted(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which finds the `except` of the step for an exception, or none at all."""

    @functools.wraps(original)
    def handle(self: Any, raised: exc.ObservedException) -> None:
        try:
            original(self, raised)
        except exc.Unsupported as error:
            variable = self.exn_vt_stack.get_current_exception()
            session.own_error = exception_of(variable, self.output.side_effects)
            if raised_at := getattr(variable, "python_stack", None):
                error.real_stack = traceback.StackSummary.from_list(raised_at)
            raise

    return handle


def exception_of(variable: Any, effects: SideEffects | None = None) -> BaseException | None:
    """The exception that a variable of Dynamo's stands for; None where it is none.

    In `effects` is what the step has assigned to its attributes.
    """
    kind = getattr(variable, "exc_type", None)
    if kind is None or not issubclass(kind, BaseException):
        return None
    args = [_value_or_words(arg) for arg in variable.args]
    if kind.__module__ == "builtins":
        made: BaseException = kind(*args)
        return made
    found: BaseException = kind.__new__(kind, *args)
    found.args = tuple(args)
    stored = effects.store_attr_mutations.get(variable, {}) if effects is not None else {}
    for name, value in stored.items():
        setattr(found, name, _value_or_words(value))
    return found


def _set_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a call of `super()`, which knows that of the `__init__` of an exception."""

    @functools.wraps(original)
    def call(self: SuperVariable, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        owner: Any = self.objvar
        if name == "__init__" and isinstance(owner, UserDefinedExceptionObjectVariable):
            inherited: Any = super(self.typevar.as_python_constant(), owner.python_type())
            if hasattr(inherited.__init__, "__objclass__") and not kwargs:  # it is Python's own
                owner.exc_vt.args = list(args)
                return ConstantVariable.create(None)
        return original(self, tx, name, args, kwargs)

    return call


def _value_or_words(variable: Any) -> Any:
    """A constant of the trace, or words for what has no value in it, such as a tensor."""
    try:
        return variable.as_python_constant()
    except NotImplementedError:
        return variable.debug_repr()


def _with_message(original: Callable[..., None]) -> Callable[..., None]:
    """`original`, which reads an attribute, with Python's words where a module has none such.

    `from module import name` raises another exception.
    """

    @functools.wraps(original)
    def load_attr(self: Any, name: Any) -> None:
        owner = self.stack[-1]
        try:
            original(self, name)
        except exc.ObservedAttributeError:
            if self.exn_vt_stack.get_current_exception().args:
                raise
            module = getattr(owner, "value", None)
            where = f"{getattr(module, '__name__', type(module).__name__)!r}"
            if self.current_instruction.opname == "IMPORT_FROM":
                told = f"cannot import name {name!r} from {where}"
                raise_observed_exception(ImportError, self, args=[told])
            told = f"module {where} has no attribute {name!r}"
            raise_observed_exception(AttributeError, self, args=[told])

    return load_attr


def _kept(message: list[str], original: Callable[..., bool]) -> Callable[..., bool]:
    """`original`, which knows an `assert` and its message, with the last one in `message`."""

    @functools.wraps(original)
    def is_assert(self: Any, *args: Any) -> bool:
        found = original(self, *args)
        if found:
            message[0] = _value_or_words(self.stack[-1])
        return found

    return is_assert


def _raised(message: list[str], original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """`original`, which refuses code, but for what raises in eager."""

    @functools.wraps(original)
    def refuse(**told: Any) -> NoReturn:
        kind, words = told.get("gb_type", ""), str(told.get("explanation", ""))
        now: Any = sys.exc_info()[1]
        found: tuple[type[Exception], list[str]] | None = None
        if kind == "failed to find name in frame builtins" and (name := _NAME.search(words)):
            found = NameError, [f"name '{name[1]}' is not defined"]
        elif kind == "Attempted to read undefined local variable" and (name := _NAME.search(words)):
            told_in_python = f"cannot access local variable '{name[1]}' where it is not associated "
            found = UnboundLocalError, [told_in_python + "with a value"]
        elif kind == "Import failure" and isinstance(now, ImportError):
            found = type(now), [str(now)]
        elif kind.startswith("failed to bind arguments") and isinstance(now, TypeError):
            called = _FUNCTION.search(words)
            found = TypeError, [f"{called[1]}(): {now}" if called else str(now)]
        elif kind.startswith("Data-dependent assertion failed"):
            found = AssertionError, [m for m in message if m != _NO_MESSAGE]
        if found is not None:
            raise_observed_exception(found[0], InstructionTranslator.current_tx(), args=found[1])
        original(**told)

    return refuse
