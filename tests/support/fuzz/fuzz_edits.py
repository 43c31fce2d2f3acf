"""What random programs do to gradients and parameters beside an optimizer of torch.

In: parameters, and tensors kept from step to step by name. `GRADIENT_EDITS` run between
`backward()` and the update, `PARAMETER_EDITS` behind it, `UPDATES` in place of an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Edit = Callable[["Edited"], object]


@dataclass(frozen=True)
class Edited:
    """One parameter, and what is `kept` of it across steps."""

    param: nn.Parameter
    kept: Mapping[str, Tensor]

    @property
    def grad(self) -> Tensor:
        assert self.param.grad is not None
        return self.param.grad


def kept_for(param: nn.Parameter) -> dict[str, Tensor]:
    """What edits and updates keep of a parameter, at the start."""
    start = param.detach().clone()
    zeros = torch.zeros_like(start)
    return {
        "anchor": start,
        "average": start.clone(),
        "slow": start.clone(),
        "first": zeros,
        "second": zeros.clone(),
        "steps": torch.zeros((), dtype=start.dtype),
    }


@dataclass(frozen=True)
class Edits:
    """The edits of a program by name, and what they keep of each parameter that has a gradient."""

    params: Mapping[str, nn.Parameter]
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    by_hand: str = ""
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept.update({name: kept_for(param) for name, param in self.params.items()})

    @torch.no_grad()
    def edit_gradients(self) -> None:
        self._apply([GRADIENT_EDITS[name] for name in self.before])

    @torch.no_grad()
    def edit_parameters(self) -> None:
        self._apply([PARAMETER_EDITS[name] for name in self.behind])

    @torch.no_grad()
    def update(self) -> None:
        """The update that is written by hand."""
        self._apply([UPDATES[self.by_hand]])

    def tensors(self) -> dict[str, Tensor]:
        """What is kept, by name."""
        return {f"{n}.{key}": t for n, kept in self.kept.items() for key, t in kept.items()}

    def _apply(self, edits: Iterable[Edit]) -> None:
        for edit in edits:
            for name, param in self.params.items():
                if param.grad is not None:
                    edit(Edited(param, self.kept[name]))


def _scale(e: Edited, limit: Tensor | float) -> None:
    norm = e.grad.norm()
    e.grad.mul_(torch.where(norm > limit, limit / (norm + 1e-6), torch.ones_like(norm)))


def _centralise(e: Edited) -> None:
    if e.grad.dim() > 1:
        e.grad.sub_(e.grad.mean(dim=1, keepdim=True))


def _new_with_noise(e: Edited) -> None:
    e.param.grad = e.grad + torch.normal(0.0, 0.01, e.grad.shape, dtype=e.grad.dtype)


def _drop_large(e: Edited) -> None:
    e.grad.copy_(torch.where(e.grad.norm() > 2.0, torch.zeros_like(e.grad), e.grad))


GRADIENT_EDITS: dict[str, Edit] = {
    "clip by value": lambda e: e.grad.clamp_(-0.05, 0.05),
    "clip each by norm": lambda e: _scale(e, 0.1),
    "adaptive clipping": lambda e: _scale(e, 0.05 * e.param.norm().clamp(min=1e-3)),
    "sign": lambda e: e.grad.copy_(e.grad.sign() * e.grad.abs().mean()),
    "centralise": _centralise,
    "scale": lambda e: e.grad.mul_(0.5),
    "no NaN": lambda e: e.grad.copy_(torch.nan_to_num(e.grad)),
    "mask": lambda e: e.grad.mul_(e.kept["anchor"].abs() > 0.1),
    "random mask": lambda e: e.grad.mul_(torch.bernoulli(torch.full_like(e.param, 0.5))),
    "noise": lambda e: e.grad.add_(torch.randn_like(e.grad), alpha=0.01),
    "new with noise": _new_with_noise,
    "L2": lambda e: e.grad.add_(e.param, alpha=0.01),
    "L2-SP": lambda e: e.grad.add_(e.param - e.kept["anchor"], alpha=0.1),
    "drop large": _drop_large,
}


def _max_norm(e: Edited) -> None:
    if e.param.dim() > 1:
        norms = e.param.norm(dim=1, keepdim=True)
        e.param.mul_(norms.clamp(max=1.0) / (norms + 1e-7))


def _renorm(e: Edited) -> None:
    if e.param.dim() > 1:
        e.param.copy_(torch.renorm(e.param, 2, 0, 1.0))


def _orthogonal(e: Edited) -> None:
    """One step of Newton and Schulz towards orthogonal rows."""
    if e.param.dim() == 2:
        unit = e.param / (e.param.norm() + 1e-3)
        e.param.copy_(1.5 * unit - 0.5 * (unit @ unit.t() @ unit))


def _lookahead(e: Edited) -> None:
    """Every other step the parameter goes half the way back."""
    e.kept["steps"].add_(1)
    goes = e.kept["steps"] % 2 == 0
    slow = e.kept["slow"]
    slow.copy_(torch.where(goes, slow + 0.5 * (e.param - slow), slow))
    e.param.copy_(torch.where(goes, slow, e.param))


PARAMETER_EDITS: dict[str, Edit] = {
    "clamp": lambda e: e.param.clamp_(-0.5, 0.5),
    "not negative": lambda e: e.param.clamp_(min=0.0),
    "max norm": _max_norm,
    "renorm": _renorm,
    "orthogonal": _orthogonal,
    "unit norm": lambda e: e.param.div_(e.param.norm() + 1e-3),
    "noise": lambda e: e.param.add_(torch.randn_like(e.param), alpha=1e-3),
    "decay": lambda e: e.param.mul_(0.99),
    "average": lambda e: e.kept["average"].lerp_(e.param, 0.1),
    "lookahead": _lookahead,
    "shrink large": lambda e: e.param.copy_(
        torch.where(e.param.norm() > 1.0, 0.9 * e.param, e.param)
    ),
}


def _sgd(e: Edited) -> None:
    e.param.sub_(0.01 * e.grad)


def _momentum(e: Edited) -> None:
    e.kept["first"].mul_(0.9).add_(e.grad)
    e.param.add_(e.kept["first"], alpha=-0.01)


def _adam(e: Edited) -> None:
    first, second, steps = e.kept["first"], e.kept["second"], e.kept["steps"]
    steps.add_(1)
    first.mul_(0.9).add_(e.grad, alpha=0.1)
    second.mul_(0.99).addcmul_(e.grad, e.grad, value=0.01)
    corrected = first / (1 - 0.9**steps)
    e.param.sub_(0.005 * corrected / ((second / (1 - 0.99**steps)).sqrt() + 1e-2))


UPDATES: dict[str, Edit] = {"SGD": _sgd, "momentum": _momentum, "Adam": _adam}
