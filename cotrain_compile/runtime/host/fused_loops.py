"""ATen's fused optimizer loops on the CPU, for one parameter or several at once.

Private torch API used: `torch._fused_adam_`, `torch._fused_adamw_`, `torch._fused_sgd_`,
`torch._fused_adagrad_`. Reason: `torch.optim` reaches them only through whole optimizers. Tried on
torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Settings = Mapping[str, Any]

# Updates the tensors of each parameter ("param" and states by name) in place, from its gradient and
# the settings of the step at hand: only floats may differ from those that the update was made for.
Tensors = Sequence[Mapping[str, torch.Tensor]]
Update = Callable[[Tensors, Sequence[torch.Tensor], Settings], None]


def _adam(settings: Settings) -> Update:
    amsgrad = settings["amsgrad"]
    decoupled = settings.get("decoupled_weight_decay", False)
    loop = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def update(of: Tensors, gradients: Sequence[torch.Tensor], now: Settings) -> None:
        for t in of:
            t["step"].add_(1)
        loop(
            [t["param"] for t in of],
            list(gradients),
            [t["exp_avg"] for t in of],
            [t["exp_avg_sq"] for t in of],
            [t["max_exp_avg_sq"] for t in of] if amsgrad else [],
            [t["step"] for t in of],
            lr=now["lr"],
            beta1=now["betas"][0],
            beta2=now["betas"][1],
            weight_decay=now["weight_decay"],
            eps=now["eps"],
            amsgrad=amsgrad,
            maximize=now["maximize"],
        )

    return update


def _sgd(settings: Settings) -> Update:
    momentum = settings["momentum"]

    def update(of: Tensors, gradients: Sequence[torch.Tensor], now: Settings) -> None:
        torch._fused_sgd_(
            [t["param"] for t in of],
            list(gradients),
            [t["momentum_buffer"] for t in of] if momentum else [],
            weight_decay=now["weight_decay"],
            momentum=now["momentum"],
            lr=now["lr"],
            dampening=now["dampening"],
            nesterov=now["nesterov"],
            maximize=now["maximize"],
            is_first_step=False,
        )

    return update


def _adagrad(_: Settings) -> Update:

    def update(of: Tensors, gradients: Sequence[torch.Tensor], now: Settings) -> None:
        for t in of:
            t["step"].add_(1)
        torch._fused_adagrad_(
            [t["param"] for t in of],
            list(gradients),
            [t["sum"] for t in of],
            [t["step"] for t in of],
            lr=now["lr"],
            lr_decay=now["lr_decay"],
            weight_decay=now["weight_decay"],
            eps=now["eps"],
            maximize=now["maximize"],
        )

    return update


# Of the classes in `optimizer_loops`. Each maker gets the settings of the parameter group; its loop
# takes the tensors that `has_loop` has found.
FUSED_LOOPS: Mapping[type, Callable[[Settings], Update]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
