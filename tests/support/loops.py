"""Loops of a small step, with what they return and leave, compared with eager's.

A function that makes a step from a model and an optimizer in; results and all tensors out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

from tests.support.closeness import assert_near
from tests.support.steps import (
    SEED,
    Step,
    all_tensors,
    cotrain,
    make_mlp,
    make_step,
    vectors,
)

MakeStep = Callable[[nn.Module, Optimizer], Step]

# What is captured is the same under every policy. Updates on the host come from it like those on
# the device, which `test_exactness` compares, and are checked against it before they run.
EACH_POLICY = (pytest.param("resident", marks=pytest.mark.long), "zero-offload")
ROUNDING = 1e-5  # of the largest element of each tensor, in a few steps


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def run(
    make: MakeStep,
    compile_with: Callable[[Step], Step] = lambda step: step,
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    steps: int = 3,
) -> tuple[list[Any], dict[str, Tensor]]:
    """What the step returned each time, and every tensor afterwards, gradients too."""
    torch.manual_seed(SEED)
    model = make_mlp()
    optimizer = make_optimizer(model)
    batches = [vectors() for _ in range(steps)]
    step = compile_with(make(model, optimizer))
    results = [step(*batch) for batch in batches]
    tensors = all_tensors(model, [optimizer])
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return results, {**tensors, **grads}


def assert_as_eager(make: MakeStep, **options: Any) -> dict[str, Tensor]:
    """With updates on the host it returns and leaves what eager does. Returns the tensors left."""
    results, tensors = run(make)
    torch._dynamo.reset()
    ours, our_tensors = run(make, cotrain(**{"policy": "zero-offload", **options}))
    assert_near(ours, results, ROUNDING)
    assert_near(our_tensors, tensors, ROUNDING)
    return tensors


def graphs() -> int:
    """How many graphs Dynamo has compiled in this test."""
    return int(counters["stats"]["unique_graphs"])


def make_clearing_first(model: nn.Module, optimizer: Optimizer) -> Step:
    return make_step(model, [optimizer], loss_of)


def make_clearing_last(
    model: nn.Module, optimizer: Optimizer, loss_of: Callable[..., Tensor] = loss_of
) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
