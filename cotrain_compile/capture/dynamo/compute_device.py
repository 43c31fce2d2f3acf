"""Compute device: while a step is traced, its tensors are seen where they compute, not where they
rest.

A parameter, state or buffer may rest on the host, or still be there because the model was built
there. In the trace it is a fake tensor on the device, so that a step is captured the same whatever
the homes are. The batch is left where it is: moving it is the user's.

Private torch API used: `FakeTensorConverter.from_real_tensor`, `Source.name`,
`MetaTensorDescriber.describe_tensor`. Reason: a fake tensor is made on the device of
the real one. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.utils.weak import WeakTensorKeyDictionary

from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.errors import OptionError

# Tensors that rest on the host, with the device that they are fetched to.
resting_on_host = WeakTensorKeyDictionary()


def chosen_device(option: str | None) -> torch.device | None:
    """The device that the option `device` names; None where a step computes where its model is.

    Raises `OptionError` where it names one that is not there.
    """
    if option != "cuda":
        return None
    if not torch.cuda.is_available():
        raise OptionError(
            "option 'device' is 'cuda', but torch sees no CUDA device here; leave it out to run "
            "on the emulated device"
        )
    return torch.device(option, torch.cuda.current_device())


def compute_device(session: Session, tensor: torch.Tensor, source: Any) -> torch.device | None:
    """Where `tensor`, reached by `source`, computes in the step; None: where it is.

    The chosen device holds for parameters, for buffers of modules, and for states of optimizers.
    Where none is chosen, a state computes where its parameter does.
    """
    resting: torch.device | None = resting_on_host.get(tensor)
    if resting is not None:
        return resting
    owner = next((o for r in session.optimizers if (o := r.owner_of(tensor)) is not None), None)
    if session.device is None:
        return None if owner is None else resting_on_host.get(owner, owner.device)
    belongs = owner is not None or isinstance(tensor, nn.Parameter) or _is_buffer(source)
    return session.device if belongs else None


@contextmanager
def seen_on_compute_device(session: Session) -> Iterator[None]:
    """Within it, tensors of the step are traced on the device where they compute."""
    patches = (
        mock.patch.object(
            FakeTensorConverter,
            "from_real_tensor",
            _fake_on_compute_device(FakeTensorConverter.from_real_tensor, session),
        ),
        mock.patch.object(
            MetaTensorDescriber,
            "describe_tensor",
            _describe_there(MetaTensorDescriber.describe_tensor),
        ),
    )
    with patches[0], patches[1]:
        yield


_there: ContextVar[torch.device | None] = ContextVar("cotrain_compute_device", default=None)


def _fake_on_compute_device(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_real_tensor(
        self: Any, fake_mode: Any, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        token = _there.set(compute_device(session, t, kwargs.get("source")))
        try:
            return original(self, fake_mode, t, *args, **kwargs)
        finally:
            _there.reset(token)

    return from_real_tensor


def _describe_there(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def describe_tensor(*args: Any, **kwargs: Any) -> Any:
        described, device = original(*args, **kwargs), _there.get()
        is_there = device is None or described.device == device
        return described if is_there else replace(described, device=device)

    return describe_tensor


def _is_buffer(source: Any) -> bool:
    """Whether a tensor was reached as a buffer of a module, which moves with it."""
    return source is not None and "._buffers[" in str(source.name)
