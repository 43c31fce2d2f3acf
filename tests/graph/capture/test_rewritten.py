"""Averages of weights, loaded ones, and a backward of several losses: what eager leaves, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from cotrain_compile.errors import CaptureError
from tests.support.steps import cotrain


def trained(compile_with: Callable[[Any], Any], make: Callable[[nn.Module], Any]) -> Any:
    """What three steps leave in the model, and in what `make(model)` made beside the step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left, backward, after = make(model)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(model(x))
        optimizer.step()
        after()

    run = compile_with(step)
    for _ in range(3):
        run(torch.randn(4, 3))
    return model.state_dict(), left.state_dict()


def squared(outputs: Tensor) -> None:
    outputs.pow(2).mean().backward()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"avg_fn": get_ema_avg_fn(0.9)}, marks=pytest.mark.long),
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    ],
)
def test_averaged_models_are_updated_in_the_step(settings: dict[str, Any]) -> None:
    def make(model: nn.Module) -> Any:
        average = AveragedModel(model, **settings)
        return (
            average,
            squared,
            lambda: average.update_parameters(model),
        )

    expected = trained(lambda step: step, make)
    assert expected[1]["n_averaged"] == 3
    torch.testing.assert_close(trained(cotrain(), make), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "backward",
    [
        lambda y: torch.autograd.backward([y[0].pow(2).sum(), y[1:].pow(3).sum()]),
        lambda y: torch.autograd.backward([y, y[0, 0] ** 2], [torch.full_like(y, 0.3), None]),
        lambda y: torch.autograd.backward(y, torch.full_like(y, 0.3)),
    ],
)
def test_a_backward_of_several_losses_is_captured(backward: Callable[[Tensor], None]) -> None:
    def make(model: nn.Module) -> Any:
        return model, backward, lambda: None

    expected = trained(lambda step: step, make)
    torch.testing.assert_close(trained(cotrain(), make), expected, rtol=0, atol=0)


def test_a_state_that_is_loaded_in_the_step_is_copied_by_its_names() -> None:
    def make(model: nn.Module) -> Any:
        target = copy.deepcopy(model)
        return target, squared, lambda: target.load_state_dict(model.state_dict())

    expected = trained(lambda step: step, make)
    torch.testing.assert_close(*expected, rtol=0, atol=0)
    torch.testing.assert_close(trained(cotrain(), make), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda state: state.pop("0.weight"), {"strict": False}),
        (lambda state: state.update({"0.bias": torch.zeros(1)}), {}),
        (lambda state: None, {"assign": True}),
    ],
)
def test_a_state_that_does_more_than_copy_is_refused_with_a_way_on(
    change: Callable[[dict[str, Tensor]], Any], settings: dict[str, Any]
) -> None:
    def make(model: nn.Module) -> Any:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        change(state)
        return model, squared, lambda: model.load_state_dict(state, **settings)

    with pytest.raises(CaptureError, match=r"[Cc]opy the tensors in the step.*between two calls"):
        trained(cotrain(), make)
