"""Parameters that the step writes by `.data`: as eager does, or refused with a way that works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cotrain_compile.errors import CaptureError
from tests.support.loops import MakeStep, assert_as_eager, loss_of, run
from tests.support.steps import Step, cotrain


def writing(
    before_update: Callable[[nn.Module], None] = lambda _: None,
    after_update: Callable[[nn.Module], None] = lambda _: None,
    before_backward: Callable[[nn.Module], None] = lambda _: None,
) -> MakeStep:
    """Makes a step that runs these outside `no_grad`."""

    def make(model: nn.Module, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            before_backward(model)
            loss.backward()
            before_update(model)
            optimizer.step()
            after_update(model)
            optimizer.zero_grad()
            return loss

        return step

    return make


def constrain(model: nn.Module) -> None:
    first, *others = model.parameters()
    first.data[0] = 0
    for param in others:
        param.data.clamp_(-0.05, 0.05)


def normalise(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data / (1 + param.data.norm())


def decay_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.data -= 0.1 * param.grad.data


def scale(model: nn.Module) -> None:
    next(model.parameters()).data.mul_(1.5)


@pytest.mark.parametrize(
    "make",
    [
        writing(decay_by_hand, constrain),
        pytest.param(writing(after_update=normalise), marks=pytest.mark.long),
        pytest.param(writing(before_backward=scale), marks=pytest.mark.long),
    ],
    ids=["in place", "assigned", "before backward"],
)
def test_what_is_written_by_data_is_what_eager_writes(make: MakeStep) -> None:
    assert_as_eager(make)


def tie(model: nn.Module) -> None:
    """Two parameters in one memory, from this step on."""
    _, bias, weight, _, *_ = model.parameters()
    weight.data = bias.data


def copy(model: nn.Module) -> None:
    _, bias, weight, _, *_ = model.parameters()
    weight.data.copy_(bias.data)


def copy_what_requires_grad(model: nn.Module) -> None:
    _, bias, weight, _, *_ = model.parameters()
    weight.data.copy_(bias)


def copy_without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        copy_what_requires_grad(model)


@pytest.mark.parametrize(
    ("refused", "advice", "followed"),
    [
        (tie, r"write p\.data\.copy_\(value\)", copy),
        (copy_what_requires_grad, r"write parameters under torch\.no_grad", copy_without_gradients),
    ],
)
def test_what_would_share_memory_or_gradients_is_refused_with_a_way_that_works(
    refused: Callable[[nn.Module], None], advice: str, followed: Callable[[nn.Module], None]
) -> None:
    with pytest.raises(CaptureError, match=advice):
        run(writing(after_update=refused), cotrain(), steps=1)
    torch._dynamo.reset()
    make = writing(after_update=followed)
    torch.testing.assert_close(run(make, cotrain(policy="zero-offload")), run(make))
