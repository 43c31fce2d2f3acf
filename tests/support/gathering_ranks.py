"""A sharded step of several ranks that gathers its parameters once, and again for the backward.

The functions here run in processes of their own (`tests/support/ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile import compile as compiling
from cotrain_compile.capture.aten import bucket_exchanges
from cotrain_compile.collectives import is_collective
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.gather_again import gathered
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan

WIDTH, WIDE, LAYERS, STEPS = 32, 1024, 7, 2


def net(width: int = WIDTH) -> nn.Sequential:
    """Layers of one size."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step


def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A job for `trace`, of wide layers."""
    return step_of(cotrain_compile.shard(net(WIDE))), (torch.ones(4, WIDE),)


@dataclass(frozen=True)
class Trained:
    """What a training has left, and what its plan was."""

    tensors: dict[str, Tensor]
    begun: list[str]
    predicted_peak: int
    measured_peak: int
    moved: int


def gather_once_and_again(rank: int) -> tuple[Trained, Trained]:
    """The same training with parameters kept for the backward, and gathered again."""
    once = _train(rank, lambda problem: schedule(problem, resident(problem.dataflow)))
    return once, _train(rank, gathering_again)


def gathering_again(problem: Problem) -> Plan:
    """Everything on the device, and every parameter gathered again."""
    names = tuple(gathered(problem.dataflow))
    return schedule(problem, replace(resident(problem.dataflow), recomputed=names))


def _train(rank: int, plan: Callable[[Problem], Plan]) -> Trained:
    torch._dynamo.reset()
    torch.manual_seed(5)
    model: Any = cotrain_compile.shard(net())
    options: Any = {"quiet": True, "verify": 1, "machine": "this-machine network=10MB"}
    step = torch.compile(step_of(model), backend="cotrain", options=options)
    generator = torch.Generator().manual_seed(rank)
    alone = mock.patch.object(bucket_exchanges, "SMALL_BYTES", 0)  # they are small here
    with alone, mock.patch.object(compiling, "plan_for", lambda problem, *rest: plan(problem)):
        for _ in range(STEPS):
            step(torch.randn(4, WIDTH, generator=generator))
    placed = cotrain_compile.inspect(step)
    assert placed.measured is not None
    begun = [node.name for node in placed.graph.nodes if is_collective(node)]
    tensors = {name: value.full_tensor() for name, value in model.state_dict().items()}
    predicted, measured = (
        timeline.peak_bytes[Tier.DEVICE] for timeline in (placed.predicted, placed.measured)
    )
    return Trained(tensors, begun, predicted, measured, len(placed.plan.moved))
