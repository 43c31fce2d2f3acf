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


@pytest.mark.parametrize("first", [(4, 4), (2, 3)], ids=["one size", "sizes that change"])
def test_a_batch_in_the_memory_of_a_parameter_is_refused(first: tuple[int, int]) -> None:
    """The update of the last weight may come before the first one's gradient reads the batch."""
    last = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    compiled = cotrain(policy="streamed", quiet=True)(step)
    for rows in first:
        compiled(torch.ones(rows, 4))
    weight = last.weight
    before = weight.detach().clone()
    told = r"is in the memory of 2\.weight|share memory that it writes"
    for x in (weight.detach(), weight.detach()[1:]):
        with pytest.raises(CaptureError, match=rf"({told}).*Pass in a \.clone\(\)"):
            compiled(x)
    assert torch.equal(weight, before)
    compiled(weight.detach().clone())


def test_a_trace_for_sizes_that_change_refuses_a_batch_in_a_parameter() -> None:
    """Of inputs that share what is written AOT makes one, and cannot where their sizes change."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    compiled = cotrain(policy="resident", quiet=True)(step)
    compiled(torch.ones(2, 4))
    with pytest.raises(CaptureError, match=r"share memory that it writes: .*Pass in a \.clone\(\)"):
        compiled(model.weight.detach())


def test_gradients_in_a_buffer_of_the_dtype_before_are_refused_by_their_name() -> None:
    """`model.to` gives a gradient that is part of a buffer other memory, and leaves it a part."""
    model = nn.Linear(4, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones(16, dtype=torch.float64).view(4, 4)

    def step(x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    model.to(torch.float32)
    compiled = cotrain(policy="resident", quiet=True)(step)
    told = r"test_one_home.py:\d+ in step: .*a gradient is part of a tensor of another dtype"
    with pytest.raises(CaptureError, match=told):
        compiled(torch.ones(2, 4))
    model.weight.grad = model.weight.grad.clone()
    compiled(torch.ones(2, 4))
