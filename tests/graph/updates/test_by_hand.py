"""Steps that update their parameters by hand, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.support.steps import Step, cotrain


def trained(compile_with: Callable[[Step], Step]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and what is left of parameters and the user's momenta; no gradient may be left."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    params = list(model.parameters())
    momenta = [torch.zeros_like(param) for param in params]

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for param, momentum in zip(params, momenta, strict=True):
                assert param.grad is not None
                momentum.mul_(0.9).add_(param.grad)
                param -= 0.05 * momentum  # type: ignore[misc]
                param.grad = None
        return loss

    run = compile_with(step)
    losses = [run(torch.randn(4, 6)) for _ in range(3)]
    assert all(param.grad is None for param in params)
    return losses, [*(param.detach() for param in params), *momenta]


def test_an_update_by_hand_is_captured_and_clears_its_gradients() -> None:
    """`param` is still the parameter after an operator has written it in place."""
    ours = trained(cotrain(policy="streamed"))
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(ours, trained(lambda step: step), rtol=0, atol=0)


def constrained(compile_with: Callable[[Step], Step], held: str) -> list[Tensor]:
    """Losses and parameters where the call writes a weight by hand, and `held` updates outside."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    first, last = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    weight: Any = model[0].weight
    outside = {"both": [first, last], "first": [first]}[held]

    def step(x: Tensor) -> Tensor:
        first.zero_grad()
        last.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        if held == "first":
            last.step()
        with torch.no_grad():
            weight.clamp_(-0.3, 0.3)
        return loss

    run = compile_with(step)
    found = []
    for _ in range(3):
        found.append(run(torch.randn(8, 4)))
        for optimizer in outside:
            optimizer.step()
    return [*found, *(param.detach() for param in model.parameters())]


@pytest.mark.parametrize("held", ["both", "first"])
def test_gradients_stay_for_an_optimizer_that_steps_outside_the_call(held: str) -> None:
    """Cleared at the start of the call, they are left for whoever updates after it."""
    ours = constrained(cotrain(policy="streamed"), held)
    torch.testing.assert_close(ours, constrained(lambda step: step, held), rtol=0, atol=0)
