"""Parameters and states of no dimensions are updated as eager does, in every precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.steps import Step, all_tensors, cotrain

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"eps": 1e-2},
    "NAdam": {"eps": 1e-2},
    "Adagrad": {"eps": 1e-2},
    "RMSprop": {"eps": 1e-2, "momentum": 0.9},
    "SGD": {"momentum": 0.9},
}


class Scaled(nn.Module):
    """A learned factor, and the mean of what it has seen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor(0.5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(), 0.1)
        scaled: Tensor = (x - self.mean) * self.factor
        return scaled


def trained(name: str, dtype: torch.dtype, compile_with: Any) -> dict[str, Tensor]:
    model = Scaled(dtype)
    make: Any = getattr(torch.optim, name)
    optimizer = make(model.parameters(), lr=0.01, foreach=False, **OPTIMIZERS[name])

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Step = compile_with(step)
    for batch in torch.arange(12, dtype=dtype).view(3, 4):
        run(batch)
    return all_tensors(model, [optimizer])


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scalar_parameter_its_states_and_a_scalar_buffer_are_updated(
    name: str, dtype: torch.dtype
) -> None:
    eager = trained(name, dtype, lambda step: step)
    ours = trained(name, dtype, cotrain(policy="zero-offload", quiet=True))
    assert ours.keys() == eager.keys()
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6, msg=key)
