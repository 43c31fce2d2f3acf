"""Optimizers that torch keeps from Dynamo, or that decide by a tensor: captured all the same.

What their flag `capturable` says before a step it says after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.steps import SEED, Step, cotrain

# ASGD averages from its second step on, so that both of its ways are taken.
MAKERS: tuple[Callable[[Iterable[Tensor]], Optimizer], ...] = (
    torch.optim.RAdam,
    lambda params: torch.optim.ASGD(params, lr=0.05, t0=1.0, weight_decay=0.01),
    torch.optim.Adamax,
    torch.optim.Rprop,
    torch.optim.Adadelta,
    lambda params: torch.optim.AdamW(params, lr=1e-2),
)


class Chain:
    """A layer for each optimizer, and the step that trains all of them."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Sequential(*(nn.Linear(6, 6) for _ in MAKERS))
        self.optimizers: list[Optimizer] = [
            make(layer.parameters()) for make, layer in zip(MAKERS, self.model, strict=True)
        ]

    def step(self, x: Tensor) -> Tensor:
        loss = torch.tanh(self.model(x)).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def run(self, step: Step, steps: int) -> list[Tensor]:
        torch.manual_seed(SEED + 1)
        losses = [step(torch.randn(4, 6)).detach() for _ in range(steps)]
        states = [o.state[p] for o in self.optimizers for g in o.param_groups for p in g["params"]]
        kept = [v for state in states for v in state.values()]
        return [*losses, *(p.detach() for p in self.model.parameters()), *kept]


def test_they_train_as_in_eager_and_go_on_in_eager_as_if_they_always_had() -> None:
    """RAdam corrects its mean only from the sixth step on."""
    placed, eager = Chain(), Chain()
    settings = [o.param_groups[0]["capturable"] for o in eager.optimizers]
    found = placed.run(cotrain(policy="zero-offload", host_kernels="captured")(placed.step), 8)
    torch.testing.assert_close(found, eager.run(eager.step, 8), rtol=1e-4, atol=1e-6)
    assert [o.param_groups[0]["capturable"] for o in placed.optimizers] == settings
    found = placed.run(placed.step, 2)
    torch.testing.assert_close(found, eager.run(eager.step, 2), rtol=1e-4, atol=1e-6)
