"""States that an optimizer makes in its first step from ops without arguments, and views of them.

As GaLore, PSGD and Shampoo do. Under `streamed` every update moves to where its gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile

ROWS = 32


class Projected(torch.optim.Optimizer):
    """Momentum in a projection of the gradient."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["basis"] = torch.eye(param.shape[0], 4)
                state["mean"] = torch.zeros_like(state["basis"].T @ param.grad)
            state["mean"].lerp_(state["basis"].T @ param.grad, 0.1)
            param.sub_(1e-3 * (state["basis"] @ state["mean"]))


class Weighed(Projected):
    """Each element of the gradient has a weight of its own, of which only the update has a view."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["weight"] = torch.linspace(0, 1, param.numel()).view_as(param.mT).mT
            param.sub_(1e-3 * state["weight"] * param.grad)


def trained(optimizer: type[Projected], compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(ROWS, ROWS, bias=False) for _ in range(3)))
    rule = optimizer(model.parameters())

    def step(batch: Tensor) -> Tensor:
        rule.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        rule.step()
        return loss

    run: Callable[[Tensor], Tensor] = step
    if compiled:
        options: dict[str, Any] = {"policy": "streamed", "quiet": True}
        run = torch.compile(step, backend="cotrain", options=options)
    for _ in range(2):
        run(torch.randn(8, ROWS))
    cotrain_compile.synchronize()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("optimizer", [Projected, Weighed])
def test_updates_that_move_find_what_was_made_for_them(optimizer: type[Projected]) -> None:
    torch.testing.assert_close(trained(optimizer, True), trained(optimizer, False))
