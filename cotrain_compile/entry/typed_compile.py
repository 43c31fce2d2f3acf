"""Typed compile: `torch.compile(step, backend="cotrain")` with every option as a keyword.

An editor completes the keywords and a type checker reads their types; their values are checked by
the call itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import torch
from torch import nn

from cotrain_compile.entry.compile_step import cotrain
from cotrain_compile.errors import CotrainError, OptionError
from cotrain_compile.options import TABLE, Keywords

P = ParamSpec("P")
R = TypeVar("R")


@overload
def compile(
    step: Callable[P, R], *, dynamic: bool | None = ..., **options: Unpack[Keywords]
) -> Callable[P, R]: ...


@overload
def compile(
    *, dynamic: bool | None = ..., **options: Unpack[Keywords]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def compile(step: Any = None, *, dynamic: bool | None = None, **options: Unpack[Keywords]) -> Any:
    """`step`, a function that is a whole training step, planned over device and host memory.

        step = cotrain_compile.compile(step, memory_budget="20GiB")

    It is `torch.compile(step, backend="cotrain", options={...})`; `dynamic` is torch's own. Without
    `step` it is a decorator: `@cotrain_compile.compile(memory_budget="20GiB")`. Raises
    `OptionError` at once for an unknown option, a bad value or a file that is not there, and
    `FormatError` for a file that is not what it should be. `docs/options.md` describes the options.
    """
    if isinstance(step, nn.Module) or not (step is None or callable(step)):
        raise OptionError(
            f"compile() got {_described(step)}, but needs the function that runs a whole training "
            "step: the one that calls the model, backward() and optimizer.step()"
        )
    given: dict[str, Any] = {**options}
    try:
        return torch.compile(step, backend=cotrain, dynamic=dynamic, options=given)
    except CotrainError as error:
        raise error.with_traceback(None) from None


def _described(value: object) -> str:
    name = type(value).__name__
    return f"the module {name}" if isinstance(value, nn.Module) else repr(value)


def _signature() -> inspect.Signature:
    """That of `compile`, with the options spelled out for `help` and notebooks."""
    given = [p for p in inspect.signature(compile).parameters.values() if p.name != "options"]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=option.given if option.default is not None else option.given | None,
        )
        for name, option in TABLE.items()
    ]
    return inspect.Signature([*given, *options], return_annotation=Callable)


compile.__signature__ = _signature()  # type: ignore[attr-defined]
