"""Offline: a step traced only to be looked at, with tensors that have no memory.

Dynamo leaves such a mode while it traces. What tracing itself makes for the step, as a loss
scaler's first scale, is made in it again. A module is moved or converted here, which torch refuses
for fake parameters, and an autocast that torch would turn off with a warning is an error.

Private torch API used: `nn.Module._apply`, `autocast._enabled`. Tried on torch 2.13.0.

Known values: what a model's constructor reads of small constants, under fake tensors.

Rates of stochastic depth are often `[x.item() for x in torch.linspace(0, rate, depth)]`. Fake
tensors have no values, so those of small tensors that are made of constants are computed beside
them, on the CPU. What is drawn at random, or left as memory was, stays unknown.

Private torch API used: `fake_tensor.unset_fake_temporarily`. Reason: values are computed for real.
Tried on torch 2.13.0.

Skip initialisation: a model is built without values, so there is nothing to fill it with.

Some of torch's functions look at the values they have drawn (`trunc_normal_` draws again what lies
outside), which fake tensors have not. A context in which those leave their tensor as it is.

Private torch API used: the functions of `torch.nn.init` named `_no_grad_...`, which do the work of
the public ones, also of those that a library has kept by another name. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.amp.autocast_mode import autocast
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from cotrain_compile.errors import CaptureError

_mode: ContextVar[FakeTensorMode | None] = ContextVar("cotrain_offline", default=None)

# What torch says where a tensor of a class of its own is made of one of the mode.
_OF_A_CLASS = re.compile(r"Creating a new Tensor subclass (\w+) but .* of type FakeTensor")


class _Mode(FakeTensorMode):
    """One mode for all that is made, copies of copies too: torch copies it with a tensor."""

    def __deepcopy__(self, memo: object) -> _Mode:
        return self


@contextmanager
def offline() -> Iterator[None]:
    """Within it, new tensors have no memory, and so has what tracing makes."""
    with ExitStack() as stack:
        mode = stack.enter_context(_Mode())
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


@contextmanager
def building() -> Iterator[None]:
    """Within it a step is built: that torch refuses a library's tensors is said with the way on.

    Of tensors that are copied torch asks where their memory is, and warns that it was asked.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    except RuntimeError as error:
        found = _OF_A_CLASS.search(str(error))
        if found is None:
            raise
        raise CaptureError(
            f"build() makes a tensor of the class {found[1]} of one that has no memory here, which "
            "torch refuses. For 8 bits bitsandbytes does so; weights that torchao's quantize_ has "
            "made are traced, and a model with others is captured where its step runs"
        ) from error


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


aten = torch.ops.aten

LARGEST = 4096  # elements whose values are computed
_HAVE_NO_VALUES = "empty"  # in the name of an op whose result is memory as it was


class KnownValues(TorchDispatchMode):
    """Within it, and within a fake mode, small tensors that are made of constants have values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        known = _is_determined(func) and all(self._is_known(t) for t in tensors)
        if known and func is aten._local_scalar_dense.default:
            return self._computed(func, args, kwargs)
        made = func(*args, **kwargs)
        results = [value for value in tree_leaves(made) if isinstance(value, torch.Tensor)]
        if known and all(map(_is_small, results)):
            values = tree_leaves(self._computed(func, args, kwargs))
            values = [value for value in values if isinstance(value, torch.Tensor)]
            for result, value in zip(results, values, strict=True):
                self._values[result] = value
        elif func._schema.is_mutable:
            self.forget(*tensors)
        return made

    def forget(self, *tensors: torch.Tensor) -> None:
        """Know no values of these any more, nor of what shares their memory."""
        written = {tensor.untyped_storage()._cdata for tensor in tensors}
        for known in list(self._values):
            if known.untyped_storage()._cdata in written:
                del self._values[known]

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is torch.Tensor or tensor in self._values

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an op makes of values, on the CPU."""

        def value_of(tensor: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self._values.get(tensor, tensor)
            return value

        asked = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        real_args, real_kwargs = tree_map_only(torch.Tensor, value_of, asked)
        with unset_fake_temporarily(), torch.no_grad():
            return func(*real_args, **real_kwargs)


def _is_determined(func: Any) -> bool:
    """Whether what `func` makes hangs on its arguments alone."""
    return torch.Tag.nondeterministic_seeded not in func.tags and (
        _HAVE_NO_VALUES not in func._schema.name
    )


def _is_small(result: torch.Tensor) -> bool:
    return (
        result.device.type != "meta"
        and result.layout is torch.strided
        and all(isinstance(size, int) for size in result.shape)
        and result.numel() <= LARGEST
    )


@contextmanager
def skip_initialisation(would_draw: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Within it `torch.nn.init` draws no values; `would_draw` is told of tensors it would fill."""

    def as_it_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        would_draw(tensor)
        return tensor

    with ExitStack() as patches:
        for name in [name for name in vars(torch.nn.init) if name.startswith("_no_grad_")]:
            patches.enter_context(mock.patch.object(torch.nn.init, name, as_it_is))
        yield
