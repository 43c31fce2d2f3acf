"""Optimizer loops: for which updates ATen has a fused loop on the CPU.

In: an optimizer's rule, and the parameter and states at hand. Out: whether a loop takes them. What
else a step does with a parameter is not looked at here: `runtime.match_update` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cotrain_compile.graph import OptimizerRule

# In narrower dtypes a loop rounds once, where the ops that were captured round each time.
WIDE = (torch.float32, torch.float64)


def has_loop(rule: OptimizerRule, tensors: Mapping[str, torch.dtype]) -> bool:
    """Whether a loop updates `tensors`, "param" and states by name, by `rule`."""
    takes = LOOP_TAKES.get(rule.optimizer)
    if takes is None or any(isinstance(value, torch.Tensor) for value in rule.settings.values()):
        return False
    return tensors.keys() == takes(rule.settings) and tensors["param"] in WIDE


def _adam(settings: Mapping[str, Any]) -> frozenset[str]:
    largest = ["max_exp_avg_sq"] if settings["amsgrad"] else []
    return frozenset(["param", "step", "exp_avg", "exp_avg_sq", *largest])


def _sgd(settings: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(["param", "momentum_buffer"] if settings["momentum"] else ["param"])


def _adagrad(_: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(["param", "sum", "step"])


# The tensors that a loop takes. By exact class: a subclass may compute something else.
LOOP_TAKES: Mapping[type, Callable[[Mapping[str, Any]], frozenset[str]]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
