"""Hooks on gradients of parameters run in a captured step as in eager, and in eager's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cotrain_compile.errors import CaptureError
from tests.support.loops import EACH_POLICY

Step = Callable[[Tensor], Tensor]


class Forked(nn.Module):
    """The second layer is used twice and made last, so that the order of use is no one's else."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.twice = (nn.Linear(3, 3) for _ in range(3))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        y: Tensor = self.last(self.twice(h) + checkpoint(self.twice, x, use_reentrant=False).cos())
        return y


def left_by(make: Callable[[Forked], tuple[Step, list[Any]]], calls: int, **options: Any) -> Any:
    """What `calls` of a step leave: parameters, what else is watched, the generator."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Forked().double()
    step, watched = make(model)
    if options:
        step = torch.compile(step, backend="cotrain", options={"quiet": True, **options})
    returned = [step(torch.randn(2, 3).double()).detach() for _ in range(calls)]
    grads = [p.grad for p in model.parameters()]
    return list(model.parameters()), grads, watched, returned, torch.get_rng_state()


def train_as_in_eager(
    make: Callable[[Forked], tuple[Step, list[Any]]], policy: str = "resident"
) -> None:
    expected = left_by(make, 3)
    found = left_by(make, 3, policy=policy, host_kernels="captured")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def per_parameter(model: Forked) -> tuple[Step, list[Any]]:
    """An optimizer for each parameter, that steps as soon as its gradient is there."""
    optimizers: dict[Tensor, torch.optim.SGD] = {
        p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()
    }

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return step, [optimizer.state_dict()["state"] for optimizer in optimizers.values()]


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_an_optimizer_in_a_hook_updates_in_the_backward(policy: str) -> None:
    train_as_in_eager(per_parameter, policy)


def in_one_order(model: Forked) -> tuple[Step, list[Any]]:
    """Hooks of each kind that read what those before them did: a running sum, random numbers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros((), dtype=torch.float64)
    calls: list[float] = []

    def noisy(gradient: Tensor) -> Tensor:
        return gradient + 0.01 * total + torch.randn_like(gradient)

    def add_up(p: nn.Parameter) -> None:
        assert p.grad is not None
        total.mul_(0.1).add_(p.grad.norm())
        calls.append(1.0)

    for p in model.parameters():
        p.register_hook(noisy)
        p.register_hook(lambda gradient: None)
        p.register_post_accumulate_grad_hook(add_up)

    def step(x: Tensor) -> Tensor:
        for part in x:
            loss: Tensor = model(part).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, [total, calls]


def test_hooks_come_in_the_order_of_autograd() -> None:
    train_as_in_eager(in_one_order)


def in_the_step(model: Forked) -> tuple[Step, list[Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        handle = model.first.weight.register_hook(lambda gradient: gradient * 2)
        loss: Tensor = model(x).square().mean()
        loss.backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, []


def test_a_hook_that_the_step_registers_and_removes_is_called() -> None:
    train_as_in_eager(in_the_step)


def plain_step(layer: nn.Linear) -> Callable[[], Tensor]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    compiled: Callable[[], Tensor] = torch.compile(
        step, backend="cotrain", options={"quiet": True, "keep_grads": True}
    )
    return compiled


def test_a_hook_counts_from_when_it_is_registered_to_when_it_is_removed() -> None:
    layer = nn.Linear(2, 1)
    step = plain_step(layer)
    ones = torch.ones(1, 2)
    assert torch.equal(step(), ones)
    handle = layer.weight.register_hook(lambda gradient: gradient * 3)
    assert torch.equal(step(), 3 * ones)
    more = layer.weight.register_hook(lambda gradient: gradient + 1)
    assert torch.equal(step(), 3 * ones + 1)
    handle.remove()
    assert torch.equal(step(), ones + 1)
    more.remove()
    assert torch.equal(step(), ones)


@pytest.mark.parametrize(
    ("differentiate", "advice"),
    [
        (
            lambda layer, loss: torch.autograd.grad(loss, layer.weight),
            "do its work in the step, on the gradient that is returned",
        ),
        (lambda layer, loss: loss.backward(create_graph=True), "after backward"),
    ],
)
def test_where_a_hook_cannot_be_called_the_step_is_refused(
    differentiate: Callable[[nn.Linear, Tensor], Any], advice: str
) -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.register_hook(lambda gradient: gradient * 3)

    def step() -> None:
        differentiate(layer, layer(torch.ones(1, 2)).square().sum())
        optimizer.step()

    with pytest.raises(CaptureError, match=advice):
        torch.compile(step, backend="cotrain")()


def test_a_torch_in_which_no_hook_can_be_traced_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("capture", "capture.dynamo.gradient_hooks"):
        monkeypatch.setattr(f"cotrain_compile.{module}.can_be_traced", lambda: False)
    layer = nn.Linear(2, 1)
    step = plain_step(layer)
    handle = layer.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"after backward\(\): on p.grad, or optimizer.step\(\)"):
        step()
    handle.remove()
    step()
