"""A tensor as large as its data says is refused at the user's line, and the advice works."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from cotrain_compile.errors import CaptureError
from tests.support.loops import MakeStep, run
from tests.support.steps import Step, cotrain


def make_selecting(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        chosen = y > 0
        loss = F.cross_entropy(model(x)[chosen], y[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_slicing(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x)[: int((y > 0).sum())], y[: int((y > 0).sum())])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_weighing(model: nn.Module, optimizer: Optimizer) -> Step:
    """What the refusal of `make_selecting` advises."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        chosen = y > 0
        each = F.cross_entropy(model(x), y, reduction="none")
        loss = torch.where(chosen, each, 0).sum() / chosen.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("make", [make_selecting, make_slicing])
def test_a_size_that_depends_on_data_is_refused_at_its_line(make: MakeStep) -> None:
    source, first = inspect.getsourcelines(make)
    line = first + next(i for i, text in enumerate(source) if "loss = " in text)
    with pytest.raises(CaptureError, match=rf"{__file__}:{line} in step: .*torch\.where\(mask"):
        run(make, cotrain(), steps=1)


def test_it_runs_in_eager_with_on_break_warn() -> None:
    eager = run(make_selecting)
    with pytest.warns(UserWarning, match="runs in eager"):
        ours = run(make_selecting, cotrain(on_break="warn"))
    torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_the_advice_gives_the_same_numbers() -> None:
    torch.testing.assert_close(
        run(make_weighing, cotrain(policy="zero-offload")), run(make_selecting)
    )
