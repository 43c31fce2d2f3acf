"""Optimizer state, made before the first trace on its first use, and undone if the trace fails.

Private torch API used: `Optimizer._init_group`, `_torchdynamo_orig_callable`. Reason: they are how
torch's optimizers make their state. Tried on torch 2.11.0, 2.13.0 and 2.15.0.

Quantized states: those of torchao's optimizers, made as their first step makes them.

Each is a tensor made of codes, scales and a table, which torchao computes by way of lists of
Python, where no trace goes.

Private API used: `torchao.optim.adam._AdamBase._new_buffer`. Reason: there is no public way to have
torchao make a state without a step. Tried on torchao 0.18.0.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cotrain_compile.capture.state.untouched import MAKE_ZEROS, zeros_on_host
from cotrain_compile.errors import HostMemoryError


@dataclass
class OptimizerRecord:
    """An optimizer of the step: what tracing changed on it, so that it can be put back."""

    optimizer: torch.optim.Optimizer
    steps: int = 0
    # Ids of the parameters whose gradient its step finds: those that it updates.
    updated: set[int] = field(default_factory=set)
    _attempt: weakref.ref[object] | None = None
    _flags: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _created: list[torch.Tensor] = field(default_factory=list)
    _stateless: set[int] = field(default_factory=set)
    _owners: dict[int, torch.Tensor] = field(default_factory=dict)

    def start_tracing(self, attempt: object) -> None:
        """Create missing state and select the per-parameter implementation.

        Dynamo may restart a trace, also after it has called the backend: each attempt begins here.
        One that reaches the optimizer in two ways comes here twice.
        """
        if self._attempt is None or self._attempt() is not attempt:
            self._attempt = weakref.ref(attempt)
            self.steps = 0
            self.updated = set()
        self._created += create_state(self.optimizer, frozenset(self._stateless))
        self._owners = {
            id(value): param
            for param, states in self.optimizer.state.items()
            for value in states.values()
        }
        self.restore_flags()
        for group in self.optimizer.param_groups:
            for flag in ("foreach", "fused"):
                if flag in group:
                    self._flags.append((group, flag, group[flag]))
                    group[flag] = False
            # Only so they have no branch on the value of a tensor. torch asks for a card where it
            # runs such an update in eager, not where it is traced.
            if isinstance(self.optimizer, torch.optim.ASGD | torch.optim.RAdam):
                self._flags.append((group, "capturable", group["capturable"]))
                group["capturable"] = True
        # A fused optimizer takes the scale into its kernel; one op per parameter is traced.
        settings = vars(self.optimizer)
        if "_step_supports_amp_scaling" in settings:
            self._flags.append((settings, "_step_supports_amp_scaling", True))
            settings["_step_supports_amp_scaling"] = False

    def owner_of(self, state: torch.Tensor) -> torch.Tensor | None:
        """The parameter whose state a tensor is; None for all else."""
        return self._owners.get(id(state))

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
    second compile). Raises `HostMemoryError`, and has made no state, where memory is short.
    """
    had = {param for param in _params(optimizer) if optimizer.state.get(param)}
    try:
        return _create_state(optimizer, stateless)
    except HostMemoryError:
        for param in _params(optimizer):
            if param not in had:
                optimizer.state.pop(param, None)
        raise


def _params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _create_state(
    optimizer: torch.optim.Optimizer, stateless: frozenset[int]
) -> list[torch.Tensor]:
    created: list[torch.Tensor] = []
    init_group = undecorated(getattr(type(optimizer), "_init_group", None))
    for group in optimizer.param_groups:
        fresh = [
            param
            for param in group["params"]
            if param.requires_grad and id(param) not in stateless and not optimizer.state.get(param)
        ]
        if fresh and (states_of := quantized_states(optimizer)):
            with torch.no_grad(), _made_on_host():
                for param in fresh:
                    optimizer.state[param].update(states_of(param, group))
            created += fresh
            continue
        if not fresh or init_group is None:
            continue
        _init_with_stand_in_gradients(optimizer, init_group, group, fresh)
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for param in fresh:
                with _made_on_host():
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param).detach()
        created += [param for param in fresh if optimizer.state.get(param)]
    return created


@contextmanager
def _made_on_host() -> Iterator[None]:
    """Within it, new tensors are made on the host: all states together may not fit on the device.

    The plan then brings each one to its home.
    """
    with _FromDataOnHost(), _OnHost():  # type: ignore[no-untyped-call]
        yield


class _FromDataOnHost(TorchFunctionMode):
    """Replaces the device of what makes a tensor of data, which no mode of ops sees."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class _OnHost(TorchDispatchMode):
    """Replaces the device of every op that takes one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in MAKE_ZEROS:
            return zeros_on_host(func, args, kwargs)
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


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
        with torch.no_grad(), _made_on_host():
            init_group(optimizer, group, *lists)
    finally:
        for param, gradient in zip(group["params"], gradients, strict=True):
            param.grad = gradient
        for param in group["params"]:
            if not optimizer.state.get(param):
                optimizer.state.pop(param, None)  # reading a defaultdict leaves an empty entry


def undecorated(function: Any) -> Callable[..., Any] | None:
    """The function under torch's decorators (profiling, hooks, `graph_break`)."""
    while True:
        if hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return cast(Callable[..., Any] | None, function)


StatesOf = Callable[[Tensor, Mapping[str, Any]], dict[str, Tensor]]


def quantized_states(optimizer: torch.optim.Optimizer) -> StatesOf | None:
    """What makes the states of a parameter in a group of `optimizer`; None if it is another's."""
    base = getattr(sys.modules.get("torchao.optim.adam"), "_AdamBase", None)
    if base is None or not isinstance(optimizer, base):
        return None
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(base.step):
        return None
    new_buffer: Callable[[Tensor, bool], Tensor] = optimizer._new_buffer

    def make(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        unsigned = ["exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        return {
            "step": torch.tensor(0.0),
            "exp_avg": new_buffer(param, True),
            **{name: new_buffer(param, False) for name in unsigned},
        }

    return make
