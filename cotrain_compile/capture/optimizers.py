"""Optimizers in the trace: seen as plain objects, with their state made beforehand.

Dynamo's own `OptimizerVariable` runs `_init_group` for real, where every gradient is still None, so
a whole-step trace would silently update nothing. Here the optimizer is a plain user object whose
`step`, `zero_grad` and `_init_group` are the functions under torch's decorators (profiling, hooks,
`graph_break`). No class and no method of the user's is changed.

Private torch API used: `UserDefinedObjectVariable`, `VariableTracker`,
`Optimizer._init_group`, `_torchdynamo_orig_callable`. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.fx.traceback import annotate

if TYPE_CHECKING:
    from cotrain_compile.capture.session import Session

# Key of the node annotation (carried by torch from Dynamo's graph to ATen's) that says which part
# of the step made a node: "backward" (accumulation of gradients) or "optimizer".
PHASE_ANNOTATION = "cotrain_phase"


@dataclass
class OptimizerRecord:
    """An optimizer of the step: what tracing changed on it, so that it can be put back."""

    optimizer: torch.optim.Optimizer
    steps: int = 0
    _flags: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _created: list[torch.Tensor] = field(default_factory=list)
    _stateless: set[int] = field(default_factory=set)

    def start_tracing(self) -> None:
        """Create missing state and select the per-parameter implementation.

        Dynamo may restart a trace, also after it has called the backend: each attempt begins here.
        """
        self.steps = 0
        self._created += create_state(self.optimizer, frozenset(self._stateless))
        self.restore_flags()
        for group in self.optimizer.param_groups:
            for flag in ("foreach", "fused"):
                if flag in group:
                    self._flags.append((group, flag, group[flag]))
                    group[flag] = False

    def restore_flags(self) -> None:
        while self._flags:
            group, flag, value = self._flags.pop()
            group[flag] = value

    def create_state_only_for(self, used: frozenset[int]) -> bool:
        """Remove created state of parameters whose id is not in `used`, and create none again.

        Returns whether there was any: then the trace, which has seen it, has to start again.
        """
        unused = [param for param in self._created if id(param) not in used]
        self._created = [param for param in self._created if id(param) in used]
        for param in unused:
            self.optimizer.state.pop(param, None)
        self._stateless.update(map(id, unused))
        return bool(unused)

    def remove_created_state(self) -> None:
        """Remove the state this tracing created."""
        for param in self._created:
            self.optimizer.state.pop(param, None)
        self._created = []


def create_state(
    optimizer: torch.optim.Optimizer, stateless: frozenset[int] = frozenset()
) -> list[torch.Tensor]:
    """Create the state of `optimizer` as its first step would, and return the parameters it is for.

    A parameter whose id is in `stateless` gets none. Without created state the first call of a
    compiled step creates it inside the graph, and the second call compiles again because the state
    is no longer empty. `_init_group` of torch's optimizers only looks at whether a parameter has a
    gradient, so each gets a stand-in of one element. An optimizer without `_init_group`, and SGD
    whose dampening makes its first step a different one, keep their lazy state (and cost that
    second compile).
    """
    created: list[torch.Tensor] = []
    init_group = _undecorated(getattr(type(optimizer), "_init_group", None))
    for group in optimizer.param_groups:
        fresh = [
            param
            for param in group["params"]
            if param.requires_grad and id(param) not in stateless and not optimizer.state.get(param)
        ]
        if not fresh or init_group is None:
            continue
        _init_with_stand_in_gradients(optimizer, init_group, group, fresh)
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for param in fresh:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param).detach()
        created += [param for param in fresh if optimizer.state.get(param)]
    return created


def _init_with_stand_in_gradients(
    optimizer: torch.optim.Optimizer,
    init_group: Callable[..., Any],
    group: dict[str, Any],
    fresh: list[torch.Tensor],
) -> None:
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(init_group).parameters)[2:]]
    gradients = [param.grad for param in group["params"]]
    try:
        for param in group["params"]:
            param.grad = None
        for param in fresh:
            param.grad = param.detach().new_zeros(()).expand_as(param)
        with torch.no_grad():
            init_group(optimizer, group, *lists)
    finally:
        for param, gradient in zip(group["params"], gradients, strict=True):
            param.grad = gradient
        for param in group["params"]:
            if not optimizer.state.get(param):
                optimizer.state.pop(param, None)  # reading a defaultdict leaves an empty entry


def build_optimizer_variable(
    session: Session, value: torch.optim.Optimizer, **kwargs: Any
) -> CapturedOptimizer:
    """Stands in for Dynamo's `OptimizerVariable` while a step is traced for us."""
    session.record_of(value).start_tracing()
    variable = CapturedOptimizer(value, **kwargs)
    variable.session = session
    return variable


class CapturedOptimizer(UserDefinedObjectVariable):
    """A `torch.optim.Optimizer` in the trace."""

    session: Session
    value: torch.optim.Optimizer
    _nonvar_fields = {"session", *UserDefinedObjectVariable._nonvar_fields}  # noqa: RUF012

    # Attribute look-up is `var_getattr` up to torch 2.14 and `tp_getattro_impl` from 2.15 on.
    def var_getattr(self, tx: Any, name: str) -> VariableTracker:
        return CapturedMethod(self, name) if name in _METHODS else super().var_getattr(tx, name)

    def tp_getattro_impl(self, tx: Any, name: str) -> VariableTracker:
        if name in _METHODS:
            return CapturedMethod(self, name)
        found: VariableTracker = super().tp_getattro_impl(tx, name)  # type: ignore[misc]
        return found

    def call_captured(
        self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> VariableTracker:
        """Trace method `name`, the way `_METHODS` says."""
        method = _undecorated(getattr(type(self.value), name))
        assert method is not None
        record = self.session.record_of(self.value)
        if name == "step":
            self._refuse_unsupported_step(args, kwargs)
            record.steps += 1
        before_backward = not tx.output.autograd_grad_consumed_grad_fns
        if name == "zero_grad" and before_backward and not args and not kwargs:
            params = (p for group in self.value.param_groups for p in group["params"])
            self.session.cleared_first.update(map(id, params))
        result: VariableTracker = tx.inline_user_function_return(
            VariableTracker.build(tx, _METHODS[name]),
            [VariableTracker.build(tx, method), self, *args],
            kwargs,
        )
        return result

    def _refuse_unsupported_step(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        name = type(self.value).__name__
        if isinstance(self.value, torch.optim.LBFGS | torch.optim.SparseAdam):
            self._refuse(f"{name} cannot be captured; use an optimizer without closure or sparsity")
        if args or kwargs:
            self._refuse(f"{name}.step(closure) evaluates the loss inside; call step() without it")
        hooks = [
            *self.value._optimizer_step_pre_hooks.values(),
            *self.value._optimizer_step_post_hooks.values(),
        ]
        if hooks:
            self._refuse(
                f"{name} has step hooks, which a captured step would skip; call them in it"
            )

    def _refuse(self, message: str) -> None:
        self.session.refuse(message)
        unimplemented(gb_type="cotrain", context="optimizer.step", explanation=message, hints=[])


class CapturedMethod(VariableTracker):
    """A bound `step`, `zero_grad` or `_init_group` in the trace."""

    _nonvar_fields = {"name", *VariableTracker._nonvar_fields}  # noqa: RUF012

    def __init__(self, owner: CapturedOptimizer, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owner, self.name = owner, name

    def python_type(self) -> type:
        return types.MethodType

    def call_function(
        self, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> VariableTracker:
        return self.owner.call_captured(tx, self.name, list(args), kwargs)


def _run_step(method: Callable[..., Any], optimizer: Any) -> Any:
    with torch.no_grad(), annotate({PHASE_ANNOTATION: "optimizer"}):
        return method(optimizer)


def _run_zero_grad(method: Callable[..., Any], optimizer: Any, set_to_none: bool = True) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()


def _run_init_group(method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return method(optimizer, *args, **kwargs)


_METHODS: dict[str, Callable[..., Any]] = {
    "step": _run_step,
    "zero_grad": _run_zero_grad,
    "_init_group": _run_init_group,
}


def _undecorated(function: Any) -> Callable[..., Any] | None:
    while True:
        if hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return cast(Callable[..., Any] | None, function)
