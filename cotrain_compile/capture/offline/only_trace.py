"""Only a trace: the captured step is handed back to who calls it, and nothing is planned or run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from cotrain_compile.errors import CotrainError
from cotrain_compile.graph import StepGraph

_on: ContextVar[bool] = ContextVar("cotrain_only_trace", default=False)


class Traced(CotrainError):
    """Ends a trace that is only for looking at; carries the captured step and its tensors."""

    def __init__(self, step: StepGraph, values: Sequence[Any]) -> None:
        super().__init__("traced")
        self.step, self.values = step, values


def only_traced(run: Callable[[], object]) -> Traced | None:
    """What `run` would compile first for this backend; None if it compiles nothing."""
    token = _on.set(True)
    try:
        run()
    except Traced as traced:
        return traced
    finally:
        _on.reset(token)
    return None


def is_only_traced() -> bool:
    """Whether this is within `only_traced`."""
    return _on.get()


def hand_back_if_only_traced(step: StepGraph, values: Sequence[Any]) -> None:
    """Raise `Traced` within `only_traced`."""
    if is_only_traced():
        raise Traced(step, values)
