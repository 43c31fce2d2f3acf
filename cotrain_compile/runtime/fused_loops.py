"""ATen's fused optimizer loops on the CPU, one parameter at a time.

Private torch API used: `torch._fused_adam_`, `torch._fused_adamw_`, `torch._fused_sgd_`,
`torch._fused_adagrad_`. Reason: `torch.optim` reaches them only through whole optimizers. Tried on
torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# Updates the tensors ("param" and states by name) in place, from a gradient and a learning rate.
Update = Callable[[Mapping[str, torch.Tensor], torch.Tensor, float], None]


def _adam(settings: Mapping[str, Any], states: frozenset[str]) -> Update | None:
    amsgrad = settings["amsgrad"]
    needed = {"param", "step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
    if states != needed:
        return None
    decoupled = settings.get("decoupled_weight_decay", False)
    loop = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = settings["betas"]

    def update(t: Mapping[str, torch.Tensor], gradient: torch.Tensor, lr: float) -> None:
        t["step"].add_(1)
        loop(
            [t["param"]],
            [gradient],
            [t["exp_avg"]],
            [t["exp_avg_sq"]],
            [t["max_exp_avg_sq"]] if amsgrad else [],
            [t["step"]],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            amsgrad=amsgrad,
            maximize=settings["maximize"],
        )

    return update


def _sgd(settings: Mapping[str, Any], states: frozenset[str]) -> Update | None:
    momentum = settings["momentum"]
    if states != ({"param", "momentum_buffer"} if momentum else {"param"}):
        return None

    def update(t: Mapping[str, torch.Tensor], gradient: torch.Tensor, lr: float) -> None:
        torch._fused_sgd_(
            [t["param"]],
            [gradient],
            [t["momentum_buffer"]] if momentum else [],
            weight_decay=settings["weight_decay"],
            momentum=momentum,
            lr=lr,
            dampening=settings["dampening"],
            nesterov=settings["nesterov"],
            maximize=settings["maximize"],
            is_first_step=False,
        )

    return update


def _adagrad(settings: Mapping[str, Any], states: frozenset[str]) -> Update | None:
    if states != {"param", "sum", "step"}:
        return None

    def update(t: Mapping[str, torch.Tensor], gradient: torch.Tensor, lr: float) -> None:
        t["step"].add_(1)
        torch._fused_adagrad_(
            [t["param"]],
            [gradient],
            [t["sum"]],
            [t["step"]],
            lr=lr,
            lr_decay=settings["lr_decay"],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=settings["maximize"],
        )

    return update


# By exact class: a subclass may compute something else. Each maker gets the settings of the
# parameter group and the names of the tensors at hand, and returns None where no loop fits them.
FUSED_LOOPS: Mapping[type, Callable[[Mapping[str, Any], frozenset[str]], Update | None]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
