"""Steps under the rules of other systems are those of the captured graph, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cotrain_compile
from cotrain_compile.placement.published import PUBLISHED
from tests.support.steps import check_peak, cotrain


@functools.cache
def train(policy: str, dtype: torch.dtype, *, mixed: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = [nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @cotrain(policy=policy, host_kernels="captured")
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(16, 24, dtype=dtype), torch.randn(16, 24, dtype=dtype)
    losses = [step(*batch).detach() for _ in range(4)]
    if policy != "resident":
        check_peak(step)
        assert cotrain_compile.inspect(step).plan.placement.policy == policy
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("policy", "dtype", "mixed"),
    [
        *((policy, torch.float32, True) for policy in PUBLISHED),
        ("zero-infinity", torch.bfloat16, False),
        *(
            pytest.param(policy, torch.bfloat16, False, marks=pytest.mark.long)
            for policy in PUBLISHED
            if policy != "zero-infinity"
        ),
    ],
)
def test_they_train_as_with_everything_on_the_device(
    policy: str, dtype: torch.dtype, mixed: bool
) -> None:
    losses, weights = train(policy, dtype, mixed=mixed)
    expected_losses, expected = train("resident", dtype, mixed=mixed)
    assert all(map(torch.equal, losses, expected_losses))
    assert all(map(torch.equal, weights, expected))
