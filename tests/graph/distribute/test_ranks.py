"""Where a process group has several ranks, a step that exchanges nothing with them is told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import cotrain_compile
from tests.support.fake_ranks import ranks


def _step(model: nn.Module, between: Any = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        if between is not None:
            between(model)
        optimizer.step()
        return loss.detach()

    return torch.compile(step, backend="cotrain")


def _all_reduce(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)


def test_ranks_that_train_apart_are_told_of() -> None:
    with ranks(2), pytest.warns(UserWarning, match="2 ranks .* each trains a model of its own"):
        _step(nn.Linear(4, 4))(torch.ones(2, 4))


def test_a_step_that_reduces_its_gradients_itself_is_not_warned_of() -> None:
    step = _step(nn.Linear(4, 4), _all_reduce)
    with ranks(2):
        step(torch.ones(2, 4))
    targets = [str(node.target) for node in cotrain_compile.inspect(step).graph.nodes]
    assert targets.count("_c10d_functional.all_reduce.default") == 2
