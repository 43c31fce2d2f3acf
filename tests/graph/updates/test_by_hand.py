"""Steps that update their parameters by hand, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable

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
