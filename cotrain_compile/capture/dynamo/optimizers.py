"""Optimizers in the trace: seen as plain objects, with their state made beforehand.

Dynamo's own `OptimizerVariable` runs `_init_group` for real, where every gradient is still None, so
a whole-step trace would silently update nothing. Here the optimizer is a plain user object whose
`step`, `zero_grad` and `_init_group` are the functions under torch's decorators (profiling, hooks,
`graph_break`). No class and no method of the user's is changed.

Private torch API used: `UserDefinedObjectVariable`, `UserFunctionVariable`, `VariableTracker`,
`_disable_dynamo_if_unsupported`,
`SideEffects.store_attr_mutations`, `SideEffects.track_object_existing`, guards. Tried on torch
2.11.0, 2.13.0 and 2.15.0, the last two on 2.13.0 alone.

Hooks on an optimizer's `step` in the trace, which torch runs around it.

Pre-hooks of all optimizers, then of this one, run before the update; its post-hooks, then those of
all optimizers, after it. A trace holds as long as there are the hooks that it has seen, also where
it has seen none.

Private torch API used: `Optimizer._optimizer_step_pre_hooks` and `._optimizer_step_post_hooks`,
those of all optimizers, the mark `hooked` of a `step` that runs them,
`InstructionTranslator.import_source`, the sources and guards of Dynamo. Reason: stock Dynamo breaks
the graph at such a step. Tried on torch 2.13.0.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Source
from torch.fx.traceback import annotate
from torch.optim import optimizer as torch_optimizer

from cotrain_compile.capture.dynamo.scaling import STEP_OF_SCALER
from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.capture.dynamo.wrappers import WrappedOptimizer, is_wrapper
from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION
from cotrain_compile.capture.state.optimizer_state import undecorated


def build_optimizer_variable(
    session: Session, value: torch.optim.Optimizer, **kwargs: Any
) -> UserDefinedObjectVariable:
    """Stands in for Dynamo's `OptimizerVariable` while a step is traced for us."""
    attempt = InstructionTranslator.current_tx().output
    if is_wrapper(value):
        wrapper = WrappedOptimizer(value, **kwargs)
        attempt.side_effects.track_object_existing(value, wrapper)
        return wrapper
    session.record_of(value).start_tracing(attempt)
    session.settings.note(value)
    variable = CapturedOptimizer(value, **kwargs)
    variable.session = session
    # Dynamo drops what is written to an object that it does not track: a count of steps, say.
    attempt.side_effects.track_object_existing(value, variable)
    return variable


class CapturedOptimizer(UserDefinedObjectVariable):
    """A `torch.optim.Optimizer` in the trace."""

    session: Session
    value: torch.optim.Optimizer
    _nonvar_fields = {"session", *UserDefinedObjectVariable._nonvar_fields}  # noqa: RUF012

    # Attribute look-up is `attributes.LOOK_UP` says which a torch calls.
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
        method = undecorated(getattr(type(self.value), name))
        assert method is not None
        run = _METHODS[name]
        if name == "zero_grad" and method is not undecorated(torch.optim.Optimizer.zero_grad):
            run = _run_as_written
        record = self.session.record_of(self.value)
        if name == "step":
            self._refuse_unsupported_step(tx, args, kwargs)
            call_hooks_before(tx, self, args, kwargs, self._refuse)
            record.steps += 1
            found = _with_gradient(tx, self.value)
        if name == "zero_grad" and not args and not kwargs:
            params = (p for group in self.value.param_groups for p in group["params"])
            self.session.note_cleared(params, bool(tx.output.autograd_grad_consumed_grad_fns))
        result: VariableTracker = tx.inline_user_function_return(
            VariableTracker.build(tx, run),
            [VariableTracker.build(tx, method), self, *args],
            kwargs,
        )
        if name == "step":
            record.updated |= found | _with_gradient(tx, self.value)
            call_hooks_after(tx, self, args, kwargs, self._refuse)
        return result

    def _refuse_unsupported_step(self, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        name = type(self.value).__name__
        if isinstance(self.value, torch.optim.LBFGS | torch.optim.SparseAdam):
            self._refuse(f"{name} cannot be captured; use an optimizer without closure or sparsity")
        if any(not _is_none(value) for value in (*args, *kwargs.values())):
            self._refuse(f"{name}.step(closure) evaluates the loss inside; call step() without it")
        if tx.f_code is STEP_OF_SCALER and has_hooks(self.value):
            self._refuse(
                f"{name} has step hooks, which GradScaler skips with the step where a gradient is "
                "not finite; do their work in the step, or train in bfloat16 autocast, which needs "
                "no scaling"
            )
        replaced = vars(self.value).get("step")
        if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
            self._refuse(
                f"step of this {name} was replaced on the object, which a captured step would "
                "skip; override it in a subclass"
            )

    def _refuse(self, message: str) -> NoReturn:
        self.session.refuse(message)
        unimplemented(gb_type="cotrain", context="optimizer.step", explanation=message, hints=[])


def _is_none(value: VariableTracker) -> bool:
    return value.is_python_constant() and value.as_python_constant() is None


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


def _with_gradient(tx: Any, optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of the parameters that have a gradient at this point of the trace.

    It is a tensor that the trace has stored in `.grad`, or what the parameter really has there.
    """
    stored = {
        id(node.meta["grapharg"].example): attributes["grad"].is_tensor()
        for variable, attributes in tx.output.side_effects.store_attr_mutations.items()
        if "grad" in attributes and (node := _placeholder(variable)) is not None
    }
    return {
        id(param)
        for group in optimizer.param_groups
        for param in group["params"]
        if stored.get(id(param), param.grad is not None)
    }


def _placeholder(variable: VariableTracker) -> fx.Node | None:
    """The input of the graph that `variable` stands for, if it is one."""
    node = getattr(getattr(variable, "proxy", None), "node", None)
    is_input = isinstance(node, fx.Node) and node.op == "placeholder" and "grapharg" in node.meta
    return node if is_input else None


def guard_parameters_without_optimizer(session: Session, module: fx.GraphModule) -> None:
    """Let the trace hold only as long as each parameter that no optimizer updates is this one.

    Dynamo takes any other in its place, as long as it looks alike; also one that an optimizer has,
    which found no gradient for it in this trace: after a layer was replaced and put back, say.
    """
    optimizers = [record.optimizer for record in session.optimizers]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    updated = {id(param) for group in groups for param in group["params"]}
    for node in module.graph.find_nodes(op="placeholder") if updated else ():
        held = node.meta.get("grapharg")
        value = getattr(held, "example", None)
        is_trained = isinstance(value, nn.Parameter) and value.requires_grad
        if is_trained and id(value) not in updated and held.source is not None:
            install_guard(held.source.make_guard(GuardBuilder.ID_MATCH))


def _run_step(method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad(), annotate({PHASE_ANNOTATION: "optimizer"}):
        return method(optimizer, *args, **kwargs)


def _run_zero_grad(method: Callable[..., Any], optimizer: Any, set_to_none: bool = True) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()


def _run_as_written(method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return method(optimizer, *args, **kwargs)


# What torch puts around the update of `adam` and most others: under Dynamo it runs the update in
# eager where the step count is on a card and the group is not `capturable`. And what it puts around
# `step`, which breaks the graph; a subclass reaches it by `super().step()`.
_CHECK_OF_CAPTURABLE = torch_optimizer._disable_dynamo_if_unsupported()(lambda: None).__code__
_AROUND_STEP = torch_optimizer._use_grad_for_differentiable(lambda self: None).__code__
_PROFILED_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def update_itself(func: Any) -> Any:
    """What to trace for a call of `func`: the update under torch's decorators, if it has these.

    The check of `capturable` keeps step counts on a card out of eager's fused ops; a captured step
    has one op per parameter. So the graph is the same on every device, and the user's flag stays as
    it is. Gradients are off already while a `step` is traced.
    """
    function = getattr(func, "fn", None)
    code = getattr(function, "__code__", None)
    if code is _CHECK_OF_CAPTURABLE:
        return UserFunctionVariable(function.__wrapped__)  # type: ignore[union-attr]
    if code is _AROUND_STEP or code is _PROFILED_STEP:
        inner = undecorated(function)
        assert isinstance(inner, types.FunctionType)
        return UserFunctionVariable(inner)
    return func


_METHODS: dict[str, Callable[..., Any]] = {
    "step": _run_step,
    "zero_grad": _run_zero_grad,
    "_init_group": _run_as_written,
}


_OWN_BEFORE, _OWN_AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_ALL_BEFORE, _ALL_AFTER = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"

# Raises with this message.
Refuse = Callable[[str], NoReturn]


def call_hooks_before(
    tx: Any, variable: VariableTracker, args: Sequence[Any], kwargs: dict[str, Any], refuse: Refuse
) -> None:
    """Trace what torch calls before `step` of the optimizer that `variable` stands for."""
    optimizer = _optimizer(variable)
    found = [*_of_all(tx, optimizer, _ALL_BEFORE), *_own(tx, variable, _OWN_BEFORE)]
    _refuse_steps_of_two_classes(optimizer, found, refuse)
    for hook in found:
        returned = _call(tx, hook, variable, args, kwargs)
        if not (returned.is_python_constant() and returned.as_python_constant() is None):
            refuse(
                f"a step pre-hook of {type(optimizer).__name__} returns new arguments for step(); "
                "let it return None, and set what the step uses in the groups"
            )


def call_hooks_after(
    tx: Any, variable: VariableTracker, args: Sequence[Any], kwargs: dict[str, Any], refuse: Refuse
) -> None:
    """Trace what torch calls after `step` of the optimizer that `variable` stands for."""
    optimizer = _optimizer(variable)
    found = [*_own(tx, variable, _OWN_AFTER), *_of_all(tx, optimizer, _ALL_AFTER)]
    _refuse_steps_of_two_classes(optimizer, found, refuse)
    for hook in found:
        _call(tx, hook, variable, args, kwargs)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch calls any hook around `step` of `optimizer`."""
    own = [getattr(optimizer, name, None) for name in (_OWN_BEFORE, _OWN_AFTER)]
    of_all = [getattr(torch_optimizer, name) for name in (_ALL_BEFORE, _ALL_AFTER)]
    return _runs_hooks(optimizer) and any([*own, *of_all])


def _call(
    tx: Any,
    hook: VariableTracker,
    variable: VariableTracker,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> VariableTracker:
    call = VariableTracker.build(tx, _call_hook)
    called: VariableTracker = tx.inline_user_function_return(call, [hook, variable, *args], kwargs)
    return called


def _call_hook(hook: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch does: the arguments of a hook are those of `step`, with the optimizer among them."""
    return hook(optimizer, (optimizer, *args), kwargs)


def _own(tx: Any, variable: VariableTracker, name: str) -> Iterator[VariableTracker]:
    """The hooks of this optimizer alone. A wrapper without `super().__init__()` has none."""
    optimizer = _optimizer(variable)
    hooks = getattr(optimizer, name, None)
    if hooks is not None and _runs_hooks(optimizer):
        yield from _built(tx, hooks, variable.source and AttrSource(variable.source, name))


def _of_all(tx: Any, optimizer: torch.optim.Optimizer, name: str) -> Iterator[VariableTracker]:
    if _runs_hooks(optimizer):
        module = tx.import_source(torch_optimizer.__name__)
        yield from _built(tx, getattr(torch_optimizer, name), AttrSource(module, name))


def _built(tx: Any, hooks: dict[int, Any], source: Source | None) -> Iterator[VariableTracker]:
    """Variables for `hooks`; the trace holds as long as these are in the dictionary at `source`."""
    if source is not None:
        install_guard(source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
    for key, hook in list(hooks.items()):
        yield VariableTracker.build(tx, hook, source and DictGetItemSource(source, key))


def _runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has put what runs hooks around the `step` of this class."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _refuse_steps_of_two_classes(
    optimizer: torch.optim.Optimizer, found: Sequence[VariableTracker], refuse: Refuse
) -> None:
    """Where a class and one that it inherits from have a `step`, each runs the hooks."""
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    if found and sum(bool(getattr(step, "hooked", False)) for step in steps) > 1:
        refuse(
            f"{type(optimizer).__name__} has step hooks, and its step() is around that of another "
            "class, which runs them too; call them in the step"
        )


def _optimizer(variable: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = variable.value
    return found
