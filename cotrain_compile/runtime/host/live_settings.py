"""Live settings: which of an optimizer's settings a host region has as inputs, by name.

A name is the setting's key; of a tuple also the position in it: `lr`, `betas.0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotrain_compile.dataflow import Role
from cotrain_compile.graph import StepInput


def live_settings(
    inputs: Sequence[StepInput | None], settings: Mapping[str, Any]
) -> Mapping[str, int] | None:
    """Positions in `inputs` of settings by name; None where one is no number of `settings`."""
    found: dict[str, int] = {}
    for position, item in enumerate(inputs):
        if item is None or item.role is not Role.HYPERPARAMETER:
            continue
        if not isinstance(value_of(settings, item.key), float):
            return None
        found[item.key] = position
    return found


def value_of(settings: Mapping[str, Any], name: str) -> Any:
    """The setting called `name`, None where there is none."""
    key, _, index = name.partition(".")
    value = settings.get(key)
    if not index:
        return value
    return value[int(index)] if isinstance(value, tuple | list) else None


def with_settings(settings: Mapping[str, Any], live: Mapping[str, float]) -> Mapping[str, Any]:
    """`settings` with the values that `live` has, by name."""
    changed = dict(settings)
    for name, value in live.items():
        key, _, index = name.partition(".")
        if index:
            values = list(changed[key])
            values[int(index)] = value
            changed[key] = tuple(values)
        else:
            changed[key] = value
    return changed
