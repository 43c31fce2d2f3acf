"""Idioms: what training steps do to a parameter beside its optimizer, before and after the update.

An `Idiom` has an edit of the gradient before the optimizer's step and one of the parameter after
it. `IdiomStep` trains one parameter for each of many idioms, all by one optimizer, in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SHAPE = (4, 6)
# What some idioms pull a weight towards.
ANCHOR = torch.linspace(-2, 2, 24).view(SHAPE)


Edit = Callable[[nn.Parameter], object]


def leave(param: nn.Parameter) -> None:
    """No edit."""


@dataclass(frozen=True)
class Idiom:
    before: Edit = leave
    after: Edit = leave
    # Whether ATen's loop still does the optimizer's part.
    is_fused: bool = True


def gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def clip_by_own_norm(param: nn.Parameter) -> None:
    """Adaptive gradient clipping: no row's gradient is large beside the row itself."""
    grad = gradient(param)
    most = param.norm(dim=1, keepdim=True).clamp_min(1e-3) * 0.01
    norm = grad.norm(dim=1, keepdim=True).clamp_min(1e-6)
    grad.copy_(torch.where(norm > most, grad * (most / norm), grad))


def limit_rows(param: nn.Parameter) -> None:
    """Max-norm: no row is longer than 1."""
    norms = param.norm(dim=1, keepdim=True)
    param.mul_(norms.clamp(max=1.0) / norms.clamp(min=1e-7))


IDIOMS: Mapping[str, Idiom] = {
    "nothing": Idiom(),
    "not negative": Idiom(after=lambda p: p.clamp_(min=0)),
    "WGAN": Idiom(after=lambda p: p.clamp_(-0.3, 0.3)),
    "max norm": Idiom(after=limit_rows),
    "renorm": Idiom(after=lambda p: p.copy_(torch.renorm(p, 2, 0, 0.5))),
    "towards an anchor": Idiom(after=lambda p: p.lerp_(ANCHOR, 0.1)),
    "rounded": Idiom(after=lambda p: p.copy_(p.bfloat16().float())),
    "decay before": Idiom(before=lambda p: p.mul_(0.9), is_fused=False),
    "adaptive clipping": Idiom(before=clip_by_own_norm),
    "noise": Idiom(before=lambda p: gradient(p).add_(torch.randn_like(p), alpha=0.5)),
    "L2": Idiom(before=lambda p: gradient(p).add_(p, alpha=0.3)),
    "L2-SP": Idiom(before=lambda p: gradient(p).add_(p - ANCHOR, alpha=0.3)),
    "both": Idiom(
        before=lambda p: gradient(p).add_(p, alpha=0.3), after=lambda p: p.clamp_(min=-0.1)
    ),
}

# What random steps are made of.
EDITS_BEFORE: tuple[Edit, ...] = (
    clip_by_own_norm,
    lambda p: gradient(p).clamp_(-1e-2, 1e-2),
    lambda p: gradient(p).add_(torch.randn_like(p), alpha=0.1),
    lambda p: gradient(p).add_(p, alpha=0.3),
    lambda p: gradient(p).neg_(),
    lambda p: gradient(p).mul_(p.norm() / (gradient(p).norm() + 1e-6)),
    lambda p: gradient(p).sub_(gradient(p).mean(1, keepdim=True)),
    lambda p: gradient(p).copy_(gradient(p).bfloat16().float()),
    lambda p: p.mul_(0.9),
)
EDITS_AFTER: tuple[Edit, ...] = (
    limit_rows,
    lambda p: p.clamp_(min=-0.2),
    lambda p: p.mul_(0.9),
    lambda p: p.lerp_(ANCHOR, 0.1),
    lambda p: p.add_(torch.randn_like(p), alpha=0.1),
    lambda p: p.add_(gradient(p), alpha=0.1),
    lambda p: p.copy_(torch.where(p.norm() > 1.0, p / p.norm(), p)),
)

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def in_turn(edits: Sequence[Edit]) -> Edit:
    """All of `edits`, one after the other."""

    def edit(param: nn.Parameter) -> None:
        for one in edits:
            one(param)

    return edit


class IdiomStep:
    """A step with one parameter for each idiom, in its order."""

    def __init__(self, idioms: Mapping[str, Idiom], optimizer: str) -> None:
        torch.manual_seed(0)
        self.idioms = list(idioms.values())
        self.params = {name: nn.Parameter(torch.randn(SHAPE)) for name in idioms}
        self.model = nn.ParameterList(self.params.values())
        self.optimizer = OPTIMIZERS[optimizer](list(self.model))

    def __call__(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = sum(((x @ param.t()).square()).mean() for param in self.model)
        loss.backward()
        with torch.no_grad():
            for param, idiom in zip(self.model, self.idioms, strict=True):
                idiom.before(param)
        self.optimizer.step()
        with torch.no_grad():
            for param, idiom in zip(self.model, self.idioms, strict=True):
                idiom.after(param)
        return loss.detach()
