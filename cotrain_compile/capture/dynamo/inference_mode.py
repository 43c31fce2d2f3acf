"""`torch.inference_mode` in a step: traced as the mode of gradients that it sets.

A captured step computes what eager does within it, and its results are ordinary tensors. Eager's
are inference tensors, which autograd refuses to save: a step that runs in eager runs here.

Dynamo puts the mode itself into its graph. There AOTAutograd fails at the first view of an input,
and the mode, which is left when the failed trace is freed, takes with it what the dispatcher knows
of that thread: every later op of the process fails.

Private torch API used: `InferenceModeVariable.create`, `TorchCtxManagerClassVariable`,
`GradModeVariable`, `VariableBuilder._wrap`. Reason: there is no switch for it. Tried on torch
2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import GradModeVariable, InferenceModeVariable
from torch._dynamo.variables.torch import TorchCtxManagerClassVariable

Patch = tuple[Any, str, Any]


def inference_mode_traced() -> Iterator[Patch]:
    """What is replaced so that a trace knows the mode of gradients alone."""
    yield InferenceModeVariable, "create", staticmethod(_mode_of_gradients)
    called = TorchCtxManagerClassVariable.call_function
    yield TorchCtxManagerClassVariable, "call_function", _with_named_mode(called)
    yield VariableBuilder, "_wrap", _made_before(VariableBuilder._wrap)


def _mode_of_gradients(tx: Any, mode: Any, **options: Any) -> GradModeVariable:
    """`inference_mode(mode)`: on, it computes no gradients; off, it does, within `no_grad` too."""
    return GradModeVariable.create(tx, not mode, **options)


def _with_named_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which makes a context manager, for `inference_mode(mode=...)` too."""

    @functools.wraps(original)
    def call(self: TorchCtxManagerClassVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.inference_mode and kwargs.keys() == {"mode"}:
            args, kwargs = [kwargs["mode"]], {}
        return original(self, tx, args, kwargs)

    return call


def _made_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which makes a variable of what a step finds, for a mode made outside it."""

    @functools.wraps(original)
    def wrap(self: VariableBuilder, value: Any) -> VariableTracker:
        if type(value) is torch.inference_mode:
            self.install_guards(GuardBuilder.ID_MATCH)
            return _mode_of_gradients(self.tx, value.mode)
        variable: VariableTracker = original(self, value)
        return variable

    return wrap
