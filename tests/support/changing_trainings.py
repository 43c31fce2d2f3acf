"""Trainings on several ranks whose settings change on the way, or that are compiled otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import cotrain_compile
from cotrain_compile.machine import Tier
from tests.support.sharded_training import MODELS, OPTIMIZERS, Net, batch, step_of, whole

BUDGET = 15_000


def scheduled(rank: int, shared: str, options: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """The parameters after steps whose learning rate falls, the last of them on fewer rows."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[shared](Net())
    optimizer = OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step: Any = step_of(model, optimizer, "clipped")
    if options is not None:
        step = torch.compile(step, backend="cotrain", options={"quiet": True, **options})
    for number in range(4):
        x, y = batch(number, rank)
        rows = 4 if number < 2 else 3
        step(x[:rows], y[:rows])
        scheduler.step()
    if options is not None and "memory_budget" in options:
        placed: Any = cotrain_compile.inspect(step)
        assert placed.plan.tasks
        assert placed.measured.peak_bytes[Tier.DEVICE] <= options["memory_budget"]
    return whole(model.state_dict())


def made_again(rank: int) -> tuple[int, float]:
    """How much a plan makes again in a deep model, and by how much that changes parameters."""
    resident, expected = _deep(rank, {"policy": "resident"})
    budget = resident.predicted.peak_bytes[Tier.DEVICE] * 7 // 10
    placed, held = _deep(rank, {"memory_budget": budget, "host_memory_budget": 1})
    assert placed.measured.peak_bytes[Tier.DEVICE] <= budget
    return len(placed.plan.placement.recomputed), (held - expected).abs().max().item()


def _deep(rank: int, options: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The compiled step of a deep model with DDP, and its parameters after some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    run: Any = torch.compile(step, backend="cotrain", options={"quiet": True, **options})
    for number in range(2):
        run(torch.randn(256, 16, generator=torch.Generator().manual_seed(number + 9 * rank)))
    held = torch.cat([param.detach().flatten() for param in model.parameters()])
    return cotrain_compile.inspect(run), held
