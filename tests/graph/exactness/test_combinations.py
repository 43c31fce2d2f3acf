"""Options that have to do with each other, together: the losses stay those of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cotrain_compile
from tests.support.steps import cross_entropy, make_step

LESS_THAN_RESIDENT = "200KiB"

TOGETHER: list[Any] = [
    pytest.param(
        {"policy": "coarse", "overlap_steps": True, "lowering": "inductor"},
        marks=pytest.mark.long,
    ),
    {"policy": "zero-offload", "overlap_steps": True, "throttle": True},
    {"policy": "zero-offload", "overlap_steps": True, "verify": 2},
    pytest.param(
        {"memory_budget": LESS_THAN_RESIDENT, "lowering": "inductor"}, marks=pytest.mark.long
    ),
    {"memory_budget": LESS_THAN_RESIDENT, "verify": 3, "host_kernels": "captured"},
]


def losses(options: dict[str, Any] | None) -> list[float]:
    """Of six steps with dropout and clipping; in eager where `options` is None."""
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128, bias=False), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = make_step(model, [optimizer], cross_entropy)
    run = torch.compile(step, backend="cotrain", options=options) if options else step
    found = [run(torch.randn(16, 128), torch.randint(0, 8, (16,))).item() for _ in range(6)]
    if options:
        assert cotrain_compile.inspect(run).plan.tasks
        cotrain_compile.synchronize()
    return found


@pytest.mark.parametrize("options", TOGETHER, ids=str)
def test_options_together_leave_the_losses_of_eager(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    assert losses(options) == pytest.approx(losses(None), abs=2e-6)
