"""`_foreach_*` ops as one op per tensor: a placement needs each parameter's update on its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

# Foreach ops whose single-tensor op has another name.
_OTHER_NAMES = {"norm": "linalg_vector_norm"}


@cache
def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """A decomposition for every functional `aten._foreach_*` overload that maps over its lists."""
    table: dict[Any, Callable[..., Any]] = {}
    for name in dir(aten):
        base = name.removeprefix("_foreach_")
        if base == name or base.endswith("_"):
            continue
        single = getattr(aten, _OTHER_NAMES.get(base, base), None)
        packet = getattr(aten, name)
        if single is None:
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if not op._schema.is_mutable and "out" not in overload:
                table[op] = _map_over_lists(single)
    return table


def _map_over_lists(single: Callable[..., Any]) -> Callable[..., list[Any]]:
    def decomposed(first: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[Any]:
        def pick(value: Any, index: int) -> Any:
            return value[index] if isinstance(value, list | tuple) else value

        return [
            single(
                tensor,
                *(pick(arg, i) for arg in args),
                **{key: pick(value, i) for key, value in kwargs.items()},
            )
            for i, tensor in enumerate(first)
        ]

    return decomposed
