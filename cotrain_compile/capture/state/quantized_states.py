"""Quantized states: those of torchao's optimizers, made as their first step makes them.

Each is a tensor made of codes, scales and a table, which torchao computes by way of lists of
Python, where no trace goes.

Private API used: `torchao.optim.adam._AdamBase._new_buffer`. Reason: there is no public way to have
torchao make a state without a step. Tried on torchao 0.18.0.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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
