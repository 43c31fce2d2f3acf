"""Hooks on an optimizer's `step` in the trace, which torch runs around it.

Pre-hooks of all optimizers, then of this one, run before the update; its post-hooks, then those of
all optimizers, after it. A trace holds as long as there are the hooks that it has seen, also where
it has seen none.

Private torch API used: `Optimizer._optimizer_step_pre_hooks` and `._optimizer_step_post_hooks`,
those of all optimizers, the mark `hooked` of a `step` that runs them,
`InstructionTranslator.import_source`, the sources and guards of Dynamo. Reason: stock Dynamo breaks
the graph at such a step. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.variables.base import VariableTracker
from torch._guards import Source
from torch.optim import optimizer as torch_optimizer

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
