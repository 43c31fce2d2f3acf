"""Offline: a step traced only to be looked at, with tensors that have no memory.

Dynamo leaves such a mode while it traces. What tracing itself makes for the step, as a loss
scaler's first scale, is made in it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

_mode: ContextVar[FakeTensorMode | None] = ContextVar("cotrain_offline", default=None)


@contextmanager
def offline() -> Iterator[None]:
    """Within it, new tensors have no memory, and so has what tracing makes."""
    with FakeTensorMode() as mode:
        token = _mode.set(mode)
        try:
            yield
        finally:
            _mode.reset(token)


def made_as_traced() -> AbstractContextManager[Any]:
    """Within it, new tensors are as those of the step: offline they have no memory either."""
    return _mode.get() or nullcontext()
