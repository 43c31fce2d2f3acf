"""Gradients that the step puts into `.grad` itself: of masters, by `torch.func`, made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from tests.support.loops import EACH_POLICY, graphs
from tests.support.steps import Step, all_tensors, cotrain

# Makes a step of a model, an optimizer and what the optimizer updates.
MakeStep = Callable[[nn.Module, torch.optim.Optimizer, list[nn.Parameter]], Step]


def make_with_masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, masters: list[nn.Parameter]
) -> Step:
    """A bfloat16 model whose optimizer updates float32 masters, that are copied back."""

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x.bfloat16()).pow(2).mean()
        loss.backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        optimizer.zero_grad()
        return loss

    return step


def make_with_masters_of_the_same_type(
    model: nn.Module, optimizer: torch.optim.Optimizer, masters: list[nn.Parameter]
) -> Step:
    """Parameter and master share one gradient, and get one new value."""

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad
            param.grad = None
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        optimizer.zero_grad()
        return loss

    return step


def make_functional(
    model: nn.Module, optimizer: torch.optim.Optimizer, masters: list[nn.Parameter]
) -> Step:
    """Gradients by `torch.func`; there is no `backward()`."""

    def loss_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).pow(2).mean()  # type: ignore[no-any-return]

    def step(x: Tensor) -> Tensor:
        params = {name: param.detach() for name, param in model.named_parameters()}
        gradients, loss = grad_and_value(loss_of)(params, x)
        for master, gradient in zip(masters, gradients.values(), strict=True):
            master.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    return step


def make_random_search(
    model: nn.Module, optimizer: torch.optim.Optimizer, masters: list[nn.Parameter]
) -> Step:
    """A gradient that is made by hand, of numbers drawn in the step."""

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            loss: Tensor = model(x).pow(2).mean()
        for master in masters:
            master.grad = torch.randn_like(master) * loss
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def train(make: MakeStep, policy: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(7)
    torch._dynamo.reset()
    dtype = torch.bfloat16 if make is make_with_masters else torch.float32
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    masters = [nn.Parameter(param.detach().clone().float()) for param in model.parameters()]
    both = nn.ModuleList([model, nn.ParameterList(masters)])
    optimizer = torch.optim.AdamW(masters, lr=0.01, foreach=False)
    step = make(model, optimizer, masters)
    if policy is not None:
        step = cotrain(policy=policy)(step)
    losses = [step(torch.randn(5, 3)).detach() for _ in range(3)]
    return losses, all_tensors(both, [optimizer])


@pytest.mark.parametrize(
    "make",
    [
        make_with_masters,
        make_with_masters_of_the_same_type,
        make_functional,
        make_random_search,
    ],
)
@pytest.mark.parametrize("policy", EACH_POLICY)
def test_gradients_that_the_step_assigns_are_used_as_in_eager(make: MakeStep, policy: str) -> None:
    losses, tensors = train(make, policy=None)
    ours, our_tensors = train(make, policy)
    torch.testing.assert_close(ours, losses)
    torch.testing.assert_close(our_tensors, tensors)
    assert graphs() == 1
