"""Methods of tensors in the trace, looked up by their names when they are called.

What replaces such a method replaces it in the class. From torch 2.14 on the trace calls what a
table of the class has held since the class was made, and would go past that.

Private torch API used: `TensorVariable.tp_methods`, `base.Method`. Reason: nothing public says what
a trace does with a method. Tried on torch 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.variables.tensor import TensorVariable

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
