"""Reads of settings: torch's own, which a trace reads hundreds of thousands of times.

Each read of `torch._dynamo.config` and the like runs four functions of Python, for settings that
have an alias, are deprecated or come from elsewhere. Most are none of these, and are read in one.

Private torch API used: `ConfigModule.__getattr__`, the fields of its entries. Reason: it is a
twentieth of a trace. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _config_module
from torch.utils._config_module import ConfigModule

TRIED = ("2.13.",)
_MISSING = object()


def settings_read_at_once() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced so that a setting is read at once: owner, name, what stands there instead.

    What is read is the same.
    """
    if torch.__version__.startswith(TRIED):
        yield ConfigModule, "__getattr__", _at_once(ConfigModule.__getattr__)


def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    unset = _config_module._UNSET_SENTINEL
    kept_as_they_are = _config_module._IMMUTABLE_CONFIG_TYPES

    @functools.wraps(original)
    def read(self: Any, name: str) -> Any:
        entry = self._config.get(name, _MISSING)
        if (
            entry is _MISSING
            or entry.hide
            or entry.deprecated
            or entry.alias is not None
            or entry.env_value_force is not unset
        ):
            return original(self, name)
        chosen = entry.user_override.get()
        if chosen is not unset:
            return chosen
        if entry.env_value_default is not unset or entry.justknob is not None:
            return original(self, name)
        default = entry.default
        return default if isinstance(default, kept_as_they_are) else original(self, name)

    return read
