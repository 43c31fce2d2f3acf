"""Steps whose updates are alike but for one, and loops around updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.alike_layers import (
    WIDTH,
    Build,
    InDouble,
    Layer,
    Model,
    frozen,
    in_one_memory,
    plain,
)

COUNT = 5
ODD = 3
"""The layer whose update differs, or is looked at."""

Optimizers = Callable[[Any], torch.optim.Optimizer]
Loop = Callable[[Any, torch.optim.Optimizer, Callable[[], Tensor]], object]


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def trained(
    optimizer: Optimizers = adam,
    *,
    make: Callable[[], nn.Module] = lambda: Model(plain(COUNT)),
    loop: Loop | None = None,
) -> Build:
    """A step of a model of a few layers; `loop` does what the step does with its loss."""

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = make()
        updates = optimizer(model)

        def step(x: Tensor) -> object:
            updates.zero_grad()
            return (loop or once)(model, updates, lambda: model(x).square().mean())

        return step, (torch.ones(2, WIDTH),)

    return build


def once(model: Any, updates: torch.optim.Optimizer, loss_of: Callable[[], Tensor]) -> Tensor:
    loss = loss_of()
    loss.backward()
    updates.step()
    return loss


def odd(model: Any) -> nn.Linear:
    linear: nn.Linear = model.layers[ODD].linear
    return linear


def with_odd(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """A model whose layers are alike, with a change to one."""

    def make() -> nn.Module:
        model = Model(plain(COUNT))
        change(odd(model))
        return model

    return make


def clipping(model: Any, updates: Any, loss_of: Callable[[], Tensor]) -> object:
    loss_of().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    updates.step()
    return norm


def in_two_parts(model: Any, updates: Any, loss_of: Callable[[], Tensor]) -> object:
    loss_of().backward()
    return once(model, updates, loss_of)


def updating_twice(model: Any, updates: Any, loss_of: Callable[[], Tensor]) -> object:
    loss_of().backward()
    updates.step()
    updates.step()
    return None


def reading_behind(model: Any, updates: Any, loss_of: Callable[[], Tensor]) -> object:
    once(model, updates, loss_of)
    return odd(model).weight.detach().sum()


def reading_a_view_behind(model: Any, updates: Any, loss_of: Callable[[], Tensor]) -> object:
    view = odd(model).weight.detach().t()
    once(model, updates, loss_of)
    return view.sum()


def reading_a_state_behind(model: Any, updates: Any, loss_of: Callable[[], Tensor]) -> object:
    once(model, updates, loss_of)
    return updates.state[odd(model).weight]["exp_avg"].sum()


def returning_a_gradient(model: Any, updates: Any, loss_of: Callable[[], Tensor]) -> object:
    once(model, updates, loss_of)
    return odd(model).weight.grad


class WritesGradients(torch.optim.Optimizer):
    """SGD that leaves a gradient as it was used."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
                p.add_(p.grad, alpha=-0.1)


class Signs(torch.optim.Optimizer):
    """An optimizer of the user's own, with a state."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p]["mean"]
                p.mul_(1 - 0.01 * group["lr"])
                p.add_(mean.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


def in_groups(model: Any) -> torch.optim.Optimizer:
    """The odd layer has another rate."""
    other = {*odd(model).parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p not in other]},
        {"params": [*odd(model).parameters()], "lr": 0.5},
    ]
    return torch.optim.Adam(groups)


def turned(linear: Any) -> None:
    linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH).t())


def tied() -> nn.Module:
    model = Model(plain(COUNT))
    odd(model).weight = model.layers[0].linear.weight  # type: ignore[union-attr, assignment]
    return model


ALIKE: dict[str, Build] = {
    "clipping": trained(loop=clipping),
    "two parts": trained(loop=in_two_parts),
    "maximize": trained(lambda m: torch.optim.Adam(m.parameters(), maximize=True)),
    "capturable": trained(lambda m: torch.optim.Adam(m.parameters(), capturable=True)),
    "fused": trained(lambda m: torch.optim.AdamW(m.parameters(), fused=True)),
    "own optimizer": trained(lambda m: Signs(m.parameters())),
    "returned gradient": trained(loop=returning_a_gradient),
}
"""Steps of which all updates but two of each kind are put in after lowering."""

DIFFERENT: dict[str, Build] = {
    "rate": trained(in_groups),
    "frozen": trained(make=with_odd(frozen)),
    "dtype": trained(make=lambda: Model([*plain(ODD), InDouble(), Layer()])),
    "shape": trained(make=lambda: Model([*plain(ODD), Layer(8), Layer()])),
    "strides": trained(make=with_odd(turned)),
    "shared parameter": trained(make=tied),
    "shared memory": trained(make=in_one_memory),
    "read behind": trained(loop=reading_behind),
    "view read behind": trained(loop=reading_a_view_behind),
    "state read behind": trained(loop=reading_a_state_behind),
    "updated twice": trained(loop=updating_twice),
    "written gradients": trained(
        lambda m: WritesGradients(m.parameters()), loop=returning_a_gradient
    ),
    "numbers of a tensor": trained(lambda m: torch.optim.Adafactor(m.parameters())),
}
"""Steps of which the update of the odd layer's weight is lowered as it is."""
