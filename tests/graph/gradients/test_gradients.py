"""Gradients of a captured step: where they are cleared, kept, added up and clipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.loops import (
    MakeStep,
    assert_as_eager,
    graphs,
    loss_of,
    make_clearing_first,
    make_clearing_last,
    run,
)
from tests.support.steps import (
    Step,
    cotrain,
    make_step,
)


def make_never_clearing(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_clearing_the_module_first(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("make", [make_clearing_first, make_clearing_the_module_first])
def test_gradients_are_gone_after_a_step_that_clears_them_first(make: MakeStep) -> None:
    _, eager = run(make)
    _, ours = run(make, cotrain(policy="zero-offload"))
    assert graphs() == 1
    assert not any(name.endswith(".grad") for name in ours)
    torch.testing.assert_close(ours, {n: eager[n] for n in ours})


def test_an_optimizers_own_zero_grad_is_called() -> None:
    class Halving(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(0.5)

    def make(model: nn.Module, _: Optimizer) -> Step:
        return make_step(model, [Halving(model.parameters(), lr=0.1)], loss_of)

    assert_as_eager(make, keep_grads=True)


@pytest.mark.parametrize("policy", ["resident", "zero-offload"])
def test_keep_grads_leaves_the_gradients_of_eager(policy: str) -> None:
    tensors = assert_as_eager(make_clearing_first, keep_grads=True, policy=policy)
    assert any(name.endswith(".grad") for name in tensors)


def test_kept_gradients_share_no_memory() -> None:
    """Both parameters get the same gradient; in eager each has its own tensor."""
    first, second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
    optimizer = torch.optim.SGD([first, second], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ((first + second) * x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for policy in ("resident", "zero-offload"):
        torch._dynamo.reset()
        cotrain(policy=policy, keep_grads=True)(step)(torch.ones(8))
        assert first.grad is not None
        assert second.grad is not None
        first.grad.zero_()
        torch.testing.assert_close(second.grad, torch.ones(8))


def test_clearing_last_leaves_no_gradients() -> None:
    tensors = assert_as_eager(make_clearing_last)
    assert not any(name.endswith(".grad") for name in tensors)


def test_gradients_that_are_never_cleared_add_up() -> None:
    tensors = assert_as_eager(make_never_clearing)
    assert any(name.endswith(".grad") for name in tensors)


def test_gradients_changed_in_place_and_never_cleared_add_up() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            loss.backward()
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
            optimizer.step()
            return loss

        return step

    tensors = assert_as_eager(make)
    assert any(name.endswith(".grad") for name in tensors)


def test_zeroed_gradients_stay_tensors() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    assert_as_eager(make)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_gradients_are_clipped(clip: Callable[[Any, float], Any]) -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
            loss = loss_of(model, x, y)
            loss.backward()
            norm = clip(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        return step

    assert_as_eager(make)


def test_micro_batches_add_their_gradients_in_one_step() -> None:
    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for half_x, half_y in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = loss_of(model, half_x, half_y) / 2
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        return step

    assert_as_eager(make, keep_grads=True)
