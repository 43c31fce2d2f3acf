"""What a step of several ranks leaves with its small exchanges in buckets, and one by one.

The functions here run in processes of their own (`tests/support/ranks.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from cotrain_compile.capture.aten import bucket_exchanges
from cotrain_compile.collectives import is_collective

WIDTH, STEPS = 24, 2


@dataclass(frozen=True)
class Left:
    """The model after some steps, and how often a step began each kind of exchange."""

    tensors: dict[str, Tensor]
    begun: Counter[str]


def one_by_one_and_in_buckets(rank: int, sharded: bool) -> tuple[Left, Left]:
    """The same training without and with buckets; with running statistics where not `sharded`."""
    with mock.patch.object(bucket_exchanges, "SMALL_BYTES", 0):
        alone = _train(rank, sharded)
    return alone, _train(rank, sharded)


def _train(rank: int, sharded: bool) -> Left:
    torch._dynamo.reset()
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(3):
        norm = nn.LayerNorm(WIDTH) if sharded else nn.BatchNorm1d(WIDTH)
        layers += [nn.Linear(WIDTH, WIDTH), norm, nn.ReLU()]
    made = nn.Sequential(*layers)
    model: Any = cotrain_compile.shard(made) if sharded else DistributedDataParallel(made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    step: Callable[[Tensor], None] = torch.compile(
        train, backend="cotrain", options={"quiet": True}
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        step(torch.randn(8, WIDTH, generator=generator))
    graph = cotrain_compile.inspect(step).graph
    begun = Counter(node.target._opname for node in graph.nodes if is_collective(node))  # type: ignore[union-attr]
    return Left({name: _whole(t) for name, t in model.state_dict().items()}, begun)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
