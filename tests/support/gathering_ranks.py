"""A sharded step of several ranks that gathers its parameters once, and again for the backward.

The functions here run in processes of their own (`tests/support/ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.capture.aten import bucket_exchanges
from cotrain_compile.entry import planner
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import gathered
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.ops import cotrain

WIDE, LAYERS = 1024, 7
# Of what ranks train, where each layer more takes time.
WIDTH, FEW_LAYERS, STEPS = 32, 4, 4
SEGMENTS = {"lowering": "inductor"}
INTERPRETED = SEGMENTS | {"eager_segments": ["*"]}


def net(width: int, layers: int) -> nn.Sequential:
    """Layers of one size."""
    alike = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*alike)


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)

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
    return step_of(cotrain_compile.shard(net(WIDE, LAYERS))), (torch.ones(4, WIDE),)


@dataclass(frozen=True)
class Trained:
    """What a training has left, and what its plan was; the least peak of its steps."""

    tensors: dict[str, Tensor]
    begun: list[str]
    predicted_peak: int
    measured_peak: int
    moved: int
    offloads: int


def gather_once_and_again(rank: int, segments: Mapping[str, Any]) -> tuple[Trained, ...]:
    """The same training with parameters kept for the backward, gathered again, and that lowered.

    And, the last, with what is gathered on the host meanwhile.
    """
    once, again = _train(rank, gathering_once), _train(rank, gathering_again)
    return once, again, _train(rank, gathering_again, segments), _train(rank, sending_gathered)


def gathering_once(problem: Problem) -> Plan:
    """Everything on the device, and every parameter kept for the backward."""
    return schedule(problem, resident(problem.dataflow))


def gathering_again(problem: Problem) -> Plan:
    """Everything on the device, and every parameter gathered again."""
    names = tuple(gathered(problem.dataflow))
    return schedule(problem, replace(resident(problem.dataflow), recomputed=names))


def sending_gathered(problem: Problem) -> Plan:
    """Everything on the device, but for what is gathered, between forward and backward."""
    names = tuple(gathered(problem.dataflow))
    return schedule(problem, replace(resident(problem.dataflow), offloaded=names))


def _train(
    rank: int, plan: Callable[[Problem], Plan], lowering: Mapping[str, Any] | None = None
) -> Trained:
    torch._dynamo.reset()
    torch.manual_seed(5)
    model: Any = cotrain_compile.shard(net(WIDTH, FEW_LAYERS))
    options: dict[str, Any] = {"quiet": True, "machine": "this-machine network=10MB"}
    options |= {"verify": 1} if lowering is None else lowering
    step = torch.compile(step_of(model), backend="cotrain", options=options)
    generator = torch.Generator().manual_seed(rank)
    alone = mock.patch.object(bucket_exchanges, "SMALL_BYTES", 0)  # they are small here
    with alone, mock.patch.object(planner, "plan_for", lambda problem, *rest: plan(problem)):
        peaks = [peak_of(step, torch.randn(4, WIDTH, generator=generator)) for _ in range(STEPS)]
    placed = cotrain_compile.inspect(step)
    begun = [node.name for node in placed.graph.nodes if is_collective(node)]
    tensors = {name: value.full_tensor() for name, value in model.state_dict().items()}
    predicted = placed.predicted.peak_bytes[Tier.DEVICE]
    offloads = sum(node.target is cotrain.offload for node in placed.graph.nodes)
    return Trained(tensors, begun, predicted, min(peaks), len(placed.plan.moved), offloads)


def peak_of(step: Callable[..., Any], batch: torch.Tensor) -> int:
    """What a step takes on the device.

    A thread of gloo may let go of what it has exchanged a little after the step has waited for it,
    so that single steps take more on a busy machine. A plan that needs more does in each of them.
    """
    step(batch)
    measured = cotrain_compile.inspect(step).measured
    assert measured is not None
    return measured.peak_bytes[Tier.DEVICE]
