"""Numbers of Python's in the trace: constants, and inputs once they change.

Dynamo makes an input of each number that it has seen change, so that a learning rate would cost a
second compile in nearly every training. Here what a scheduler of torch changes is an input from the
first trace on, and so is a rate that is no longer the one the optimizer was made with: loops that
set it by hand do so before their first step. A constant rate stays a constant, which is eager's
arithmetic to the bit in more optimizers. Each other setting (`betas`, `eps`, ...) that first
changes later would cost one more compile; the second such compile makes inputs of all settings, and
is the last. A whole number that Dynamo finds by way of a global is a constant to it, whatever it
does: a script that counts its steps would be traced anew in each. Here it becomes an input as one
of a closure does.

A trace may begin again with fewer states: an optimizer's state of a parameter that gets no gradient
is dropped, and `list(optimizer.state)[1]` is another one than before. To Dynamo a tensor of that
name has changed its size, and would have one that changes from then on.

What is remembered is of one step and lies where Dynamo keeps what it knows of the code: another
training by the same code has its own, and `torch._dynamo.reset()` forgets it. Otherwise ranks that
have trained before, in different ways, would compile the same step differently.

Private torch API used: `variables.builder.process_automatic_dynamic`, `pgo.auto_dynamic`,
`GuardSource.GLOBAL`, the dictionary `frame_state` that Dynamo keeps for each code,
`utils.TensorStaticReason`. Reason: they decide which numbers are inputs. Tried on torch 2.11.0,
2.13.0 and 2.15.0, all but the first two on 2.13.0 alone.

CalledStep: the step of a call, told apart from others that run the same code.

It is what `torch.compile` was called with, what the function closes over, and the object that it is
a method of. Dynamo tells code alone apart.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo import pgo
from torch._dynamo.utils import TensorStaticReason
from torch._dynamo.variables import builder
from torch._guards import GuardSource
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

_KEPT_AS = "_cotrain_settings"


@dataclass
class _Seen:
    """The settings of an optimizer when a step was first traced, and which have changed.

    One that is `scheduled` has a scheduler that moves its rates.
    """

    first: Mapping[tuple[int, str, int], float]
    scheduled: bool
    changed: set[tuple[int, str, int]] = field(default_factory=set)


@dataclass
class SeenSettings:
    """The settings of all optimizers of one step, as its traces have found them.

    With `as_inputs` they have changed at different times, and all are inputs from then on.
    """

    step: CalledStep
    of: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen]
    as_inputs: bool = False

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the settings with which `optimizer` is first traced."""
        if optimizer not in self.of:
            self.of[optimizer] = _Seen(_settings(optimizer), _is_scheduled(optimizer))


def seen_settings(frame_state: dict[str, Any], step: CalledStep) -> SeenSettings:
    """What is remembered of `step`; trainings whose optimizers are gone are forgotten."""
    kept: list[SeenSettings] = frame_state.setdefault(_KEPT_AS, [])
    kept[:] = [seen for seen in kept if seen.of or seen.step.is_same(step)]
    for seen in kept:
        if seen.step.is_same(step):
            return seen
    kept.append(SeenSettings(step, weakref.WeakKeyDictionary()))
    return kept[-1]


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of torch moves the rates of `optimizer`.

    Such a scheduler leaves `initial_lr` in each group, but for `ReduceLROnPlateau`, which leaves
    nothing there: the collector knows what holds the optimizer. It takes some 10 ms for each
    100,000 objects, once for each step function.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        return True
    holders = gc.get_referrers(optimizer)
    # Where somebody has asked a scheduler for all that it has, a dictionary of that is between.
    between = [one for one in holders if type(one) is dict and one.get("optimizer") is optimizer]
    if between:  # to ask for nothing takes as long
        holders += gc.get_referrers(*between)
    return any(isinstance(one, LRScheduler) for one in holders)


@contextmanager
def settings_traced(seen: SeenSettings) -> Iterator[None]:
    """Within it, a trace of the step that they are of takes settings as inputs that change.

    All of them are inputs, if it has come to that.
    """
    _note_changes(seen)
    original = builder.process_automatic_dynamic  # type: ignore[attr-defined]
    fixed: dict[str, Any] = {}

    def process(tx: Any, name: str, entry: Any, **options: Any) -> Any:
        found = original(tx, name, entry, **options)
        _keep_size(name, entry, found, fixed)
        is_setting = "param_groups" in name and isinstance(entry.scalar, float)
        if is_setting and (seen.as_inputs or _is_to_change(seen, name, entry.scalar)):
            return replace(found, scalar=pgo.auto_dynamic)
        return found

    with mock.patch.object(builder, "process_automatic_dynamic", process):
        yield


def _keep_size(name: str, entry: Any, found: Any, fixed: dict[str, Any]) -> None:
    """Let what Dynamo has `found` of a tensor's sizes be those of `entry`, its tensor of now.

    That is where another tensor had the name earlier in this call, of which sizes were `fixed`.
    """
    if name in fixed and fixed[name].size != entry.size:
        found.size, found.stride = entry.size, entry.stride
    if found.size == entry.size and found.stride == entry.stride:
        fixed[name] = entry


def whole_numbers_traced(is_constant: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`is_constant` of Dynamo but for numbers found by way of globals, and counts of optimizers."""

    @functools.wraps(is_constant)
    def decide(value: Any, source: Any) -> bool:
        name = source.name() if callable(source.name) else source.name  # a method in torch 2.11
        is_of_an_optimizer = "param_groups" in name or ".state[" in name
        is_of_a_global = source.guard_source is GuardSource.GLOBAL and "defaults__" not in name
        return not is_of_an_optimizer and not is_of_a_global and bool(is_constant(value, source))

    return decide


def sizes_fixed(has_static_shape: Callable[..., Any]) -> Callable[..., Any]:
    """`has_static_shape` of Dynamo, which takes the sizes of a plain parameter as they are, for all
    parameters, DTensors too, for their gradients and for what an optimizer holds.

    A step of a model of other sizes is another step; else its parameters would have symbols.
    """

    @functools.wraps(has_static_shape)
    def decide(tensor: Any, is_tensor: bool, tensor_source: Any) -> Any:
        name = tensor_source.name
        name = name() if callable(name) else name  # a method in torch 2.11
        of_an_optimizer = "param_groups" in name or ".state[" in name
        if isinstance(tensor, nn.Parameter) or of_an_optimizer or name.endswith(".grad"):
            return True, TensorStaticReason.PARAMETER
        return has_static_shape(tensor, is_tensor, tensor_source)

    return decide


def _is_to_change(seen: SeenSettings, name: str, value: float) -> bool:
    """Whether the setting that Dynamo names so, with this value, is going to change.

    The name does not say which optimizer it is of: a rate that equals that of another is an input
    too, which costs nothing but the constant.
    """
    return any(
        name.endswith(place) and value == setting
        for optimizer, settings in seen.of.items()
        for place, setting in _to_change(optimizer, settings.scheduled)
    )


def _to_change(optimizer: torch.optim.Optimizer, scheduled: bool) -> Iterator[tuple[str, Any]]:
    """What a scheduler of torch changes, and rates that are not those of the beginning any more.

    Yields how the name of such a setting ends, and its value.

    A scheduler that moves the momentum leaves `max_momentum` in each group. Of several groups some
    may have a rate of their own from the beginning.
    """
    # A wrapper that never calls `super().__init__()` has none.
    made_with = getattr(optimizer, "defaults", {}).get("lr")
    have_moved = all(group.get("lr") != made_with for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if have_moved or scheduled or "initial_lr" in group:
            yield "['lr']", group.get("lr")
        if "max_momentum" in group and "betas" in group:
            yield "['betas'][0]", group["betas"][0]
        elif "max_momentum" in group:
            yield "['momentum']", group["momentum"]


def _note_changes(seen: SeenSettings) -> None:
    """Note which settings have changed, and if others had when they brought about a trace."""
    not_the_first = any(settings.changed for settings in seen.of.values())
    for optimizer, settings in seen.of.items():
        now = _settings(optimizer)
        changed = {place for place, value in settings.first.items() if now.get(place) != value}
        seen.as_inputs |= not_the_first and not changed <= settings.changed
        settings.changed |= changed


def _settings(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str, int], float]:
    """All Python floats among the settings, by group, key and position in it."""
    return {
        (number, key, position): leaf
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
        for position, leaf in enumerate(tree_leaves(value))
        if type(leaf) is float
    }


# What a function closes over: "object" or "cell", and its id.
FrameObjects = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class CalledStep:
    """The step of a call: two that one function has made, or two objects have, are two."""

    code: CodeType
    compiler_fn: object
    objects: FrameObjects
    owner: weakref.ref[Any] | None

    def is_same(self, other: CalledStep) -> bool:
        """Whether both are of one step, which is still there."""
        if self.compiler_fn is not other.compiler_fn or self.objects != other.objects:
            return False
        if self.owner is None or other.owner is None:
            return self.owner is other.owner
        return self.owner() is other.owner()


def called_step(
    code: CodeType, compiler_fn: object, objects: FrameObjects, values: Mapping[str, Any]
) -> CalledStep:
    """The step of a frame with these local `values`."""
    return CalledStep(code, compiler_fn, objects, _owner(code, values))


def _owner(code: CodeType, values: Mapping[str, Any]) -> weakref.ref[Any] | None:
    """What the code is a method of, or None."""
    first = values.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, torch.Tensor) or not hasattr(type(first), code.co_name):
        return None
    try:
        return weakref.ref(first)
    except TypeError:  # of a class that allows none
        return None
