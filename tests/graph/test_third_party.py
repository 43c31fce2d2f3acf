"""Optimizers that are not torch's: plain subclasses go through capture, or fail with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.errors import CaptureError
from tests.graph.captured_steps import make_plain_mlp
from tests.graph.steps import SEED, Step, all_tensors, cotrain, cross_entropy, make_step, vectors

POLICIES = ("resident", "zero-offload")


class SignDescent(Optimizer):
    """Steps by the sign of a momentum, as Lion does; its state is made in the first step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                average = state["average"]
                update = average.mul(first).add(param.grad, alpha=1 - first).sign_()
                param.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(param.grad, alpha=1 - second)


class WarmedMomentum(Optimizer):
    """Momentum that grows with the number of steps, which it keeps as a Python float."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["steps"] = 0.0
                    state["velocity"] = torch.zeros_like(param)
                state["steps"] += 1.0
                momentum = 0.9 * state["steps"] / (state["steps"] + 3.0)
                state["velocity"].mul_(momentum).add_(param.grad)
                param.add_(state["velocity"], alpha=-group["lr"])


class CountingSteps(Optimizer):
    """Keeps the number of steps as a Python int, as many do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    param.add_(param.grad / (1 + state["step"]), alpha=-group["lr"])


def lion(params: Any) -> Optimizer:
    package = pytest.importorskip("lion_pytorch")
    made: Optimizer = package.Lion(params, lr=1e-3, weight_decay=0.01)
    return made


def train(
    make_optimizer: Callable[[Any], Optimizer], compile_with: Callable[[Step], Step]
) -> tuple[list[Any], Any]:
    torch.manual_seed(SEED)
    model = make_plain_mlp().double()
    optimizer = make_optimizer(model.parameters())
    step = compile_with(make_step(model, [optimizer], cross_entropy))
    losses = []
    for _ in range(6):
        x, y = vectors()
        losses.append(step(x.double(), y))
    return losses, all_tensors(model, [optimizer])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("make_optimizer", "graphs"),
    # State that the first step makes is there in the second one, which is then another graph. A
    # Python float that is written back is a constant of each graph: every step compiles again.
    # An int becomes an input with the third.
    [(SignDescent, 2), (CountingSteps, 3), (WarmedMomentum, 6), (lion, 2)],
)
def test_a_plain_subclass_is_captured(
    make_optimizer: Callable[[Any], Optimizer], graphs: int, policy: str
) -> None:
    ours = train(make_optimizer, cotrain(policy=policy))
    torch.testing.assert_close(ours, train(make_optimizer, lambda step: step))
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_count_of_steps_needs_no_new_plan() -> None:
    plans = []
    inspected: list[Step] = []

    def compile_with(step: Step) -> Step:
        inspected.append(cotrain()(step))

        def run(*batch: Any) -> Any:
            result = inspected[0](*batch)
            plans.append(cotrain_compile.inspect(inspected[0]))
            return result

        return run

    train(CountingSteps, compile_with)
    assert len(set(map(id, plans))) == 3


class AskingTheDevice(SignDescent):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if self.param_groups[0]["params"][0].norm() > 1:
            self.param_groups[0]["lr"] *= 0.5


def test_one_that_decides_by_data_is_refused_with_a_reason() -> None:
    model: nn.Module = make_plain_mlp()
    step = make_step(model, [AskingTheDevice(model.parameters())], cross_entropy)
    with pytest.raises(CaptureError, match=r"norm\(\) > 1.*torch.where"):
        cotrain()(step)(*vectors())
