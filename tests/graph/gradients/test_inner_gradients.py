"""Gradients that the step takes itself, by `torch.autograd.grad` or of its inputs, are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.loops import MakeStep, assert_as_eager, loss_of
from tests.support.steps import Step, cotrain


def make_pinn(model: nn.Module, optimizer: Optimizer) -> Step:
    """Second derivatives by the input, each of one tensor by one tensor."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.requires_grad_(True)
        u = model(x)
        slope = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        curve = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
        loss = (curve + slope).pow(2).mean() + loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_gradient_penalty(model: nn.Module, optimizer: Optimizer) -> Step:
    """As WGAN-GP is usually written, with keywords, by a leaf that the step makes."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        mixed = (0.3 * x + 0.7 * x.flip(0)).requires_grad_(True)
        unused = x.detach().clone().requires_grad_()
        out = model(mixed)
        gradient = torch.autograd.grad(
            outputs=out,
            inputs=mixed,
            grad_outputs=torch.ones_like(out),
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )[0]
        (none,) = torch.autograd.grad(out.sum(), unused, create_graph=True, allow_unused=True)
        assert none is None
        loss = loss_of(model, x, y) + (gradient.norm(2, dim=1) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss, mixed

    return step


def make_adversarial(model: nn.Module, optimizer: Optimizer) -> Step:
    """The fast gradient sign method as its tutorial writes it: the input is told by assignment."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad = True
        loss_of(model, x, y).backward()
        assert x.grad is not None
        moved = (x + 0.1 * x.grad.data.sign()).detach()
        optimizer.zero_grad()
        loss = loss_of(model, moved, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_assigning(model: nn.Module, optimizer: Optimizer) -> Step:
    """Gradients by one parameter and by a list are put into `.grad` by hand."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        first, *others = model.parameters()
        loss = loss_of(model, x, y)
        first.grad = torch.autograd.grad(loss, first, retain_graph=True)[0]
        for param, gradient in zip(others, torch.autograd.grad(loss, others), strict=True):
            param.grad = gradient
        optimizer.step()
        return loss

    return step


class MadeAgain(torch.autograd.Function):
    """A checkpoint written by hand: its backward runs the forward again, and differentiates it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        with torch.no_grad():
            return torch.tanh(x * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.tanh(x * scale)
        return torch.autograd.grad(out, (x, scale), gradient)


def make_made_again(model: nn.Module, optimizer: Optimizer) -> Step:
    """Leaves that the backward of a function makes are not leaves of the step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        scale = next(model.parameters()).mean()
        out: Tensor = MadeAgain.apply(model(x), scale)  # type: ignore[no-untyped-call]
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


# Dynamo makes an instance of each function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        make_pinn,
        *(
            pytest.param(m, marks=pytest.mark.long)
            for m in (make_gradient_penalty, make_adversarial)
        ),
        make_assigning,
        make_made_again,
    ],
)
def test_gradients_taken_in_the_step_are_those_of_eager(make: MakeStep) -> None:
    assert_as_eager(make, keep_grads=True)


def test_an_input_that_the_step_makes_a_leaf_is_one_afterwards_and_adds_up_gradients() -> None:
    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, points = nn.Linear(3, 1), torch.randn(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            value = model(points.requires_grad_()).tanh()
            slope = torch.autograd.grad(value.sum(), points, create_graph=True)[0]
            (value - slope).pow(2).mean().backward()
            optimizer.step()

        run_step = cotrain(policy="zero-offload")(step) if compiled else step
        for _ in range(3):
            run_step()
        assert points.requires_grad
        assert points.grad is not None
        return [points.grad, model.weight.detach()]

    torch.testing.assert_close(run(compiled=True), run(compiled=False))
