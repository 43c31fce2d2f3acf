"""A step as a user writes it, whose plan runs the loss in parts: eager's numbers in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from tests.support.steps import check_peak, cotrain

CLASSES, WIDTH, TOKENS = 4000, 32, 256


def training() -> tuple[Any, tuple[Tensor, Tensor]]:
    """A step of a model with many classes and nothing else that is large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randint(CLASSES, (2, TOKENS))

    def step(x: Tensor, classes: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        optimizer.step()
        return loss

    return step, (batch[0], batch[1])


def test_a_step_in_less_memory_than_its_logits_need_is_that_of_eager() -> None:
    step, batch = training()
    expected = [step(*batch).item() for _ in range(3)]
    step, batch = training()
    logits = 4 * TOKENS * CLASSES
    options = {"memory_budget": 2 * logits, "work_limit": 4.0}
    compiled = cotrain(**options)(step)
    found = [compiled(*batch).item() for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert cotrain_compile.inspect(compiled).plan.placement.splits
    check_peak(compiled)
