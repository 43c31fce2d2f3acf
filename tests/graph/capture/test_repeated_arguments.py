"""A function of the user's with a backward of its own, that gets a tensor twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Weighed(torch.autograd.Function):
    """The product of two, whose gradients are not alike."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left * right

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return 2 * grad * right, 3 * grad * left


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_its_gradient_is_the_sum_of_both() -> None:
    def updated(compiled: bool) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            y = layer(x)
            loss: Tensor = Weighed.apply(y, y).sum()  # type: ignore[no-untyped-call]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.compile(step, backend="cotrain", options={"quiet": True}) if compiled else step
        run(torch.ones(3, 4))
        return layer.weight.detach()

    assert torch.equal(updated(compiled=True), updated(compiled=False))
