"""Offline: a step traced only to be looked at, with tensors that have no memory.

Dynamo leaves such a mode while it traces. What tracing itself makes for the step, as a loss
scaler's first scale, is made in it again. A module is moved or converted here, which torch refuses
for fake parameters, and an autocast that torch would turn off with a warning is an error.

Private torch API used: `nn.Module._apply`, `autocast._enabled`. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import autocast

from cotrain_compile.errors import CaptureError

_mode: ContextVar[FakeTensorMode | None] = ContextVar("cotrain_offline", default=None)


@contextmanager
def offline() -> Iterator[None]:
    """Within it, new tensors have no memory, and so has what tracing makes."""
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(
            mock.patch.object(autocast, "__init__", _refusing_to_be_off(autocast.__init__))
        )
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _applying_to_fakes({})))
        token = _mode.set(mode)
        try:
            yield
        finally:
            _mode.reset(token)


def made_as_traced() -> AbstractContextManager[Any]:
    """Within it, new tensors are as those of the step: offline they have no memory either."""
    return _mode.get() or nullcontext()


def _refusing_to_be_off(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(  # noqa: N807
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if enabled and device_type == "cuda" and not torch.cuda.is_available():
            raise CaptureError(
                'autocast("cuda") is off where torch sees no card, so the step would be traced in '
                "full precision: trace it as on a card, with --device cuda or "
                'trace(..., device="cuda")'
            )
        original(self, device_type, dtype, enabled, cache_enabled)

    return __init__


def _told(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a change of a module may change."""
    return tensor.dtype, tensor.device, tensor.stride()


def _applying_to_fakes(made: dict[int, tuple[Any, nn.Parameter]]) -> Callable[..., Any]:
    """`nn.Module._apply`, which puts a new parameter in the place of a fake one that changes.

    `made` has the new one for each old one, so that tied weights stay tied, and keeps both alive.
    """
    original: Callable[..., nn.Module] = nn.Module._apply

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        own = [*self.parameters(recurse=False)]
        if not any(isinstance(param, FakeTensor) for param in own):
            return original(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        for key, param in self._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                with torch.no_grad():
                    applied = fn(param)
                same = _told(applied) == _told(param)
                new = param if same else nn.Parameter(applied, param.requires_grad)
                made[id(param)] = (param, new)
            self._parameters[key] = made[id(param)][1]
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    return _apply
