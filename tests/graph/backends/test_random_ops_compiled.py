"""Random ops under Inductor draw what they draw in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import cotrain_compile


def test_a_mask_of_float64_is_drawn_as_in_eager() -> None:
    """Inductor compares with what it draws in float32, the kernel in float64."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()

    def make(own: nn.Linear) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = own(x).square().mean()
            loss.backward()
            for param in own.parameters():
                assert param.grad is not None
                param.grad.mul_(torch.bernoulli(torch.full_like(param, 0.5)))
            optimizer.step()
            return loss.detach()

        return step

    x, other = torch.randn(3, 4, dtype=torch.float64), copy.deepcopy(model)
    compiled = cotrain_compile.compile(make(model), lowering="inductor", quiet=True)
    found = []
    for run in (compiled, make(other)):
        torch.manual_seed(1)
        found.append([run(x) for _ in range(3)])
    torch.testing.assert_close(*found)
