"""Forwards that depend on a gradient of the same step: values are made again in each of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.dataflow import Phase
from tests.support.loops import MakeStep, assert_as_eager, loss_of
from tests.support.steps import Step, cotrain

WAVES = (torch.ops.aten.cos.default, torch.ops.aten.sin.default)


def make_adversarial(model: nn.Module, optimizer: Optimizer) -> Step:
    """Two steps of projected gradient ascent on the batch, then one on the model."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        shift = torch.zeros_like(x)
        for _ in range(2):
            shift = shift.detach().requires_grad_()
            slope = torch.autograd.grad(loss_of(model, x + shift, y), shift)[0]
            shift = (shift + 0.03 * slope.sign()).clamp(-0.05, 0.05)
        loss = loss_of(model, (x + shift).detach(), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_sharpness_aware(model: nn.Module, optimizer: Optimizer) -> Step:
    """SAM: the gradient at the worst point near by, for the parameters as they were."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        params: list[Tensor] = [param for param in model.parameters() if param.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        with torch.no_grad():
            climbs = [0.05 * p.grad / norm for p in params if p.grad is not None]
            torch._foreach_add_(params, climbs)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        with torch.no_grad():
            torch._foreach_sub_(params, climbs)
        optimizer.step()
        return loss

    return step


def make_meta_learning(model: nn.Module, optimizer: Optimizer) -> Step:
    """MAML: the loss of parameters that one gradient step has adapted, through that step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        params = dict(model.named_parameters())
        inner = loss_of(lambda batch: functional_call(model, params, (batch,)), x[:4], y[:4])  # type: ignore[arg-type]
        slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        adapted = {n: p - 0.1 * s for (n, p), s in zip(params.items(), slopes, strict=True)}
        loss = loss_of(lambda batch: functional_call(model, adapted, (batch,)), x[4:], y[4:])  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(
    "make",
    [
        *(
            pytest.param(m, marks=pytest.mark.long)
            for m in (make_adversarial, make_sharpness_aware)
        ),
        make_meta_learning,
    ],
)
def test_a_forward_that_depends_on_a_gradient_is_eagers_with_remat(make: MakeStep) -> None:
    assert_as_eager(make, keep_grads=True, remat=True)


class Waves(nn.Module):
    """Much between two products that is cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.widen(x)
        return self.narrow((wide.cos() * wide.sin()).cos().sin() * wide)  # type: ignore[no-any-return]


def waves_and_products(make: MakeStep, remat: bool) -> tuple[int, int]:
    """How many waves and how many products of the forward are in the backward of a step."""
    torch._dynamo.reset()
    model = Waves()
    step = cotrain(remat=remat)(make(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    step(torch.randn(6, 8), torch.randint(0, 4, (6,)))
    graph = cotrain_compile.inspect(step).graph
    made = [n.target for n in graph.nodes if graph.phases.get(n.name) is Phase.BACKWARD]
    return sum(map(made.count, WAVES)), made.count(torch.ops.aten.addmm.default)


def make_silent(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        loss_of(model, x, y).backward()
        optimizer.step()

    return step


def test_values_are_made_again_in_every_round_also_where_its_loss_is_not_returned() -> None:
    kept = waves_and_products(make_silent, remat=False)[0]
    again, products = waves_and_products(make_silent, remat=True)
    assert again > kept
    assert products == 0
    assert waves_and_products(make_sharpness_aware, remat=True) == (2 * again, 0)
