"""Tensors that come to share memory after a step was planned lie on one tier, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.errors import CaptureError
from cotrain_compile.machine import Tier
from tests.support.steps import cotrain


def test_parameters_that_become_one_vector_are_refused_where_their_homes_differ() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(4, 8)
    resident = cotrain(policy="resident", quiet=True)(step)
    resident(x)
    peak = cotrain_compile.inspect(resident).predicted.peak_bytes[Tier.DEVICE]
    torch._dynamo.reset()
    compiled = cotrain(memory_budget=int(0.85 * peak), quiet=True)(step)
    compiled(x)
    params = list(model.parameters())
    nn.utils.vector_to_parameters(torch.cat([p.detach().flatten() for p in params]), params)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"share memory.*p\.data = p\.data\.clone\(\)"):
        compiled(x)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for p in params:
        p.data = p.data.clone()
    compiled(x)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    measured = cotrain_compile.inspect(compiled).measured
    assert measured is not None
    assert measured.peak_bytes[Tier.DEVICE] <= int(0.85 * peak)
