"""Wrappers of frameworks: models and optimizers of Accelerate and Fabric, as a step calls them.

An optimizer of either is a `torch.optim.Optimizer` whose `step` decides, by Python flags, whether
to call that of the optimizer inside; so the trace goes into it, and what a graph has to know of an
optimizer is noted of the one inside. Fabric's model hangs a hook on what it returns, which raises
where the loop calls `loss.backward()` in place of `fabric.backward(loss)`; both are the same where
no loss is scaled, and the hook is left out there.

Private API used: `AcceleratedOptimizer.gradient_state` and `._is_overflow`, `GradScaler._scale`;
`_FabricOptimizer`, `_FabricModule` and its `_register_backward_hook`; `UserDefinedObjectVariable`.
Reason: Dynamo cannot trace how Accelerate's `zero_grad` looks at a signature, how its `step`
patches the optimizer while a loss is scaled, nor Fabric's hook. Tried with Accelerate 1.15, Fabric
2.6 and torch 2.13.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")
_OPTIMIZERS = (
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    *((place, "_FabricOptimizer") for place in _FABRIC),
)


def is_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` hands its work to another one inside."""
    return any(isinstance(optimizer, _named(*place)) for place in _OPTIMIZERS)


class WrappedOptimizer(UserDefinedObjectVariable):
    """Such a wrapper in the trace: what it is, but for the methods of `_instead`."""

    # Attribute look-up is `attributes.LOOK_UP` says which a torch calls.
    def var_getattr(self, tx: Any, name: str) -> VariableTracker:
        return self._instead(name) or super().var_getattr(tx, name)

    def tp_getattro_impl(self, tx: Any, name: str) -> VariableTracker:
        found: VariableTracker = self._instead(name) or super().tp_getattro_impl(tx, name)  # type: ignore[misc]
        return found

    def _instead(self, name: str) -> VariableTracker | None:
        if name == "zero_grad":
            return _Method(self, _zero_grad)
        wrapper: Any = self.value
        if name != "step" or getattr(wrapper, "scaler", None) is None:
            return None
        # A fused one looks at the scaler's flag itself, so that Accelerate sees no skipped step.
        fused = getattr(wrapper.optimizer, "_step_supports_amp_scaling", False)
        return _Method(self, _scaled_step if fused else _scaled_step_seen)


class _Method(VariableTracker):
    """A bound method of a wrapper that is traced as the function `run`."""

    _nonvar_fields = {"run", *VariableTracker._nonvar_fields}  # noqa: RUF012

    def __init__(self, owner: WrappedOptimizer, run: Callable[..., None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owner, self.run = owner, run

    def call_function(
        self, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> VariableTracker:
        run = VariableTracker.build(tx, self.run)
        found: VariableTracker = tx.inline_user_function_return(run, [self.owner, *args], kwargs)
        return found


def _zero_grad(wrapper: Any, set_to_none: bool | None = None) -> None:
    gradients = getattr(wrapper, "gradient_state", None)  # Accelerate clears where it updates
    if gradients is None or gradients.sync_gradients:
        wrapper.optimizer.zero_grad(set_to_none=set_to_none is not False)


def _scaled_step(wrapper: Any) -> None:
    if wrapper.gradient_state.sync_gradients:
        wrapper.scaler.step(wrapper.optimizer)
        wrapper.scaler.update()


def _scaled_step_seen(wrapper: Any) -> None:
    """The same, noting whether the update was skipped, which Accelerate's schedulers ask for."""
    if wrapper.gradient_state.sync_gradients:
        before = wrapper.scaler._scale.clone()
        _scaled_step(wrapper)
        wrapper._is_overflow = wrapper.scaler._scale < before


def without_hook(func: Any, args: Sequence[Any]) -> Any:
    """What to trace for a call of `func`: itself, or for Fabric's hook on an output nothing."""
    function = getattr(func, "fn", None)
    hooks = [getattr(_named(place, "_FabricModule"), _HOOK, None) for place in _FABRIC]
    if function is None or function not in hooks or _scales(vars(args[0]).get("value")):
        return func
    return UserFunctionVariable(_as_it_is)  # type: ignore[arg-type]


def _as_it_is(module: Any, tensor: Tensor) -> Tensor:
    return tensor


def _scales(module: Any) -> bool:
    """Whether the backward of this model of Fabric's is another one than that of its loss."""
    strategy = module._strategy
    base: Any = next(c for c in type(strategy).__mro__ if c.__name__ == "Strategy")
    return (
        getattr(strategy.precision, "scaler", None) is not None
        or type(strategy).backward is not base.backward
    )


def _named(place: str, name: str) -> Any:
    """The class `name` of a module, or one that nothing is of while that is not imported."""
    return getattr(sys.modules.get(place), name, _Nothing)


class _Nothing:
    pass


_HOOK = "_register_backward_hook"
