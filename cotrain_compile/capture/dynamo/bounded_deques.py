"""A `deque(maxlen=...)` of the user's in the trace: full, it drops an item for each it gets.

Dynamo reads such a deque as one without a bound. The deque itself came out right, but what the step
computed of it (`sum(losses) / len(losses)`) was of one item too many.

Private torch API used: `VariableBuilder.wrap_listlike`, `DequeVariable.maxlen`,
`SideEffects.codegen_update_mutated`. Reason: they read a deque, trace its methods and write it
back. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import DequeVariable

Patch = tuple[Any, str, Any]


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
