"""Log calls and warnings in a step: said while it is traced, once, and no part of the graph.

A library warns where it is used in a way that it did not expect, and goes on; so does the step. A
call that shows a tensor, whose value the trace does not know, is refused, but where its level is
switched off.

Dynamo may trace a step in several attempts. Each makes the same calls in the same order, and what
one has said the next does not say again.

Private torch API used: `LoggingLoggerVariable`, `SkipFunctionVariable`, and where a translator is:
`f_code`, `lineno`, `parent`, `f_globals`, `output`. Reason: torch's own settings leave such calls
out or move them behind the step. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch._dynamo
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable

from cotrain_compile.capture.dynamo.attributes import LOOK_UP
from cotrain_compile.capture.dynamo.own_errors import exception_of

Patch = tuple[Any, str, Any]

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
_ASKS = {"isEnabledFor", "getEffectiveLevel", "hasHandlers"}
_SET = {"name", "level", "propagate", "disabled"}
_CHANGES = {"setLevel", "addHandler", "removeHandler", "addFilter", "removeFilter"}
_OF_THE_ROOT = {getattr(logging, name): name for name in _LEVELS if hasattr(logging, name)}
_FILTERS = (warnings.simplefilter, warnings.filterwarnings)
_LOGGING = (logging.__file__, warnings.__file__)
_DYNAMO = os.path.dirname(torch._dynamo.__file__) + os.sep  # of functions that it puts in between


class Said:
    """How many calls have been said in this session, and how many this attempt has made."""

    def __init__(self) -> None:
        self.count, self.attempt, self.made = 0, None, 0

    def is_new(self, tx: Any) -> bool:
        """Whether the call that `tx` makes now has not been said in an earlier attempt."""
        if self.attempt is not tx.output:
            self.attempt, self.made = tx.output, 0
        self.made += 1
        self.count = max(self.count, self.made - 1)
        if self.made <= self.count:
            return False
        self.count = self.made
        return True


def log_calls_traced(said: Said) -> Iterator[Patch]:
    """What is replaced so that a trace says what a step logs and warns of."""
    logged = _logged(said, LoggingLoggerVariable.call_method)
    yield LoggingLoggerVariable, "call_method", logged
    asked = _asked(getattr(LoggingLoggerVariable, LOOK_UP))
    yield LoggingLoggerVariable, LOOK_UP, asked
    called = _called(said, SkipFunctionVariable.call_function)
    yield SkipFunctionVariable, "call_function", called


def said_in_trace(said: Said, tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Do what a call of `logging` or `warnings` does; None for any other, which is to be traced."""
    if function is warnings.warn:
        return _warn(said, tx, args, kwargs)
    if function is logging.getLogger or function in _FILTERS:
        values = _values(args, kwargs)
        found = values and function(*values[0], **values[1])
        if found is None:
            return values and ConstantVariable.create(None)
        return LoggingLoggerVariable(found)
    if name := _OF_THE_ROOT.get(function):
        return _log(said, logging.getLogger(), tx, name, args, kwargs)
    return None


def _logged(said: Said, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a call of a method of a logger, for those that say something or ask."""

    @functools.wraps(original)
    def call(self: LoggingLoggerVariable, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        done = None if name in _CHANGES else _log(said, self.value, tx, name, args, kwargs)
        return original(self, tx, name, args, kwargs) if done is None else done

    return call


def _log(
    said: Said, logger: logging.Logger, tx: Any, name: str, args: Any, kwargs: Any
) -> ConstantVariable | None:
    """Do what this call of a method does; None where it shows what has no value in the trace."""
    silent = name in _LEVELS and not logger.isEnabledFor(_LEVELS[name])
    if silent:
        return ConstantVariable.create(None)
    values = _values(args, kwargs)
    method = getattr(logger, name, None)
    if values is None or method is None:
        return None
    args, kwargs = values
    if name in _ASKS:
        answer: ConstantVariable = ConstantVariable.create(method(*args, **kwargs))
        return answer
    level: Any = _LEVELS.get(name, args[0] if name == "log" else None)
    is_new = said.is_new(tx)
    if is_new and level is None:  # a method that a library has added, such as `warning_once`
        method(*args, **kwargs)
    elif is_new and logger.isEnabledFor(level):
        frame = _frame(tx, kwargs.get("stacklevel", 1))
        message, *rest = args[1:] if name == "log" else args
        place = (frame.f_code.co_filename, frame.lineno, message, tuple(rest), None)
        logger.handle(
            logger.makeRecord(logger.name, level, *place, frame.f_code.co_name, kwargs.get("extra"))
        )
    return ConstantVariable.create(None)


def _asked(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which reads an attribute of a logger, for those that say what it is set to."""

    @functools.wraps(original)
    def look_up(self: LoggingLoggerVariable, tx: Any, name: str) -> Any:
        if name in _SET:
            return ConstantVariable.create(getattr(self.value, name))
        return original(self, tx, name)

    return look_up


def _called(said: Said, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a call of a function that Dynamo does not trace, for those that only tell."""

    @functools.wraps(original)
    def call(self: SkipFunctionVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        done = said_in_trace(said, tx, self.value, args, kwargs) if callable(self.value) else None
        return original(self, tx, args, kwargs) if done is None else done

    return call


def _warn(said: Said, tx: Any, args: Any, kwargs: Any) -> ConstantVariable | None:
    values = _values(args, kwargs)
    if values is None:
        return None
    if said.is_new(tx):
        _warn_at(tx, *values[0], **values[1])
    return ConstantVariable.create(None)


def _warn_at(
    tx: Any,
    message: str | Warning,
    category: type[Warning] | None = None,
    stacklevel: int = 1,
    source: object = None,
    *,
    skip_file_prefixes: tuple[str, ...] = (),
) -> None:
    """`warnings.warn`, as from the line that is traced."""
    frame = _frame(tx, stacklevel)
    while frame.parent is not None and frame.f_code.co_filename.startswith(skip_file_prefixes):
        frame = frame.parent
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    try:
        warnings.warn_explicit(
            message,
            kind,
            frame.f_code.co_filename,
            frame.lineno,
            frame.f_globals.get("__name__"),
            frame.f_globals.setdefault("__warningregistry__", {}),
        )
    except Warning as error:  # where filters have it be an error
        raise_observed_exception(type(error), tx, args=[str(error)])


def _values(args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a call, or None where the trace does not know them."""
    try:
        return [_value(arg) for arg in args], {name: _value(arg) for name, arg in kwargs.items()}
    except NotImplementedError:
        return None


def _value(variable: Any) -> Any:
    return exception_of(variable) or variable.as_python_constant()


def _frame(tx: Any, stacklevel: int) -> Any:
    """Where a message is from that names the function so many calls out; at most the step."""
    while tx.parent is not None and tx.f_code.co_filename in _LOGGING:
        tx = tx.parent
    for _ in range(stacklevel - 1):
        tx = tx.parent or tx
        while tx.parent is not None and tx.f_code.co_filename.startswith(_DYNAMO):
            tx = tx.parent
    return tx
