"""Load into homes: `optimizer.load_state_dict` writes into the states that are there.

torch puts loaded states next to their parameter, in new tensors. A state at home on the host would
land on the device, which may not have the room, and lose its pinned memory. With these hooks a
loaded state is copied into the tensor that is the home, on whichever tier and of whichever dtype
that is; scalars, and what has no home of its shape, are left to torch. A DTensor is copied into one
that is placed alike, and a quantized state, one made of tensors, into one that is made alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class _Landing:
    """Stands for a loaded value on its way through `load_state_dict`, which leaves it as it is."""

    home: torch.Tensor
    value: torch.Tensor


def load_into_homes(optimizer: torch.optim.Optimizer) -> None:
    """From now on, loaded states go into the tensors that `optimizer.state` holds at that time.

    Nothing is written if `load_state_dict` refuses what it is given. A wrapper of an optimizer that
    never calls `super().__init__()` has no hooks, nor torch's `load_state_dict`, which runs them.
    """
    if optimizer not in _hooked and hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        _hooked.add(optimizer)
        optimizer.register_load_state_dict_pre_hook(_name_homes)
        optimizer.register_load_state_dict_post_hook(_land)


_hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _name_homes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """`saved` with a `_Landing` for each value that has a home."""
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # Of different lengths they are refused by `load_state_dict` itself.
    homes = {key: optimizer.state.get(param, {}) for key, param in zip(keys, params, strict=False)}
    state = {key: _with_homes(homes.get(key, {}), values) for key, values in saved["state"].items()}
    return {**saved, "state": state}


def _with_homes(homes: Mapping[str, Any], values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        name: _Landing(homes[name], value) if _fits(homes.get(name), value) else value
        for name, value in values.items()
    }


def _fits(home: object, value: object) -> bool:
    # A scalar has no home to keep, and torch's optimizers read their step count while they load.
    if not isinstance(home, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    alike = type(home) is type(value) and home.shape == value.shape
    return alike and home.dim() > 0 and _made_alike(home, value)


def _made_alike(home: torch.Tensor, value: Any) -> bool:
    """Whether both are plain, DTensors that are placed alike, or made of such as fit each other."""
    if hasattr(home, "placements"):
        return bool(home.placements == value.placements)
    if not is_traceable_wrapper_subclass(home):
        return type(home) is torch.Tensor
    names, facts = home.__tensor_flatten__()
    return (names, facts) == value.__tensor_flatten__() and all(
        getattr(home, name).shape == getattr(value, name).shape for name in names
    )


def _copy(home: torch.Tensor, value: torch.Tensor) -> None:
    if hasattr(home, "placements") or not is_traceable_wrapper_subclass(home):
        home.copy_(value)
        return
    for name in home.__tensor_flatten__()[0]:
        _copy(getattr(home, name), getattr(value, name))


def _land(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for values in optimizer.state.values():
            for name, landing in values.items():
                if isinstance(landing, _Landing):
                    _copy(landing.home, landing.value)
                    values[name] = landing.home
