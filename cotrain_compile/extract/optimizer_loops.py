"""Optimizer loops: for which updates ATen has a fused loop on the CPU.

In: an optimizer's rule, and the parameter and states at hand. Out: whether a loop takes them. What
else a step does with a parameter is not looked at here: `runtime.match_update` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cotrain_compile.graph import OptimizerRule

WIDE = (torch.float32, torch.float64)
# Not float16: there 1e-8, the usual epsilon, is 0 in the ops that were captured and not in a loop,
# so the two differ by more than rounding.
NARROW = (torch.bfloat16,)
# Of narrow tensors these loops compute each element in float32 and round once, as `fused=True` has
# eager do, on the CPU and on cards. Where that is not asked for, eager rounds after every op, as do
# the ops that were captured. The CPU's loops of SGD and Adagrad round in between (torch 2.13).
_ROUNDS_ONCE = frozenset({torch.optim.Adam, torch.optim.AdamW})


def has_loop(rule: OptimizerRule, tensors: Mapping[str, torch.dtype]) -> bool:
    """Whether a loop updates `tensors`, "param" and states by name, by `rule`."""
    takes = LOOP_TAKES.get(rule.optimizer)
    if takes is None or any(isinstance(value, torch.Tensor) for value in rule.settings.values()):
        return False
    own = {tensors["param"], *(d for name, d in tensors.items() if name != "step")}
    return (
        tensors.keys() == takes(rule.settings)
        and rounds_as_eager(rule, tensors["param"])
        and (tensors["param"] in WIDE or len(own) == 1)
    )


def rounds_as_eager(rule: OptimizerRule, param: torch.dtype) -> bool:
    """Whether the loop for a parameter of this dtype rounds where eager does."""
    if param in WIDE:
        return True
    return param in NARROW and rule.optimizer in _ROUNDS_ONCE and bool(rule.settings.get("fused"))


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
