"""What a step of several ranks leaves with its small exchanges in buckets, and one by one.

The functions here run in processes of their own (`tests/support/ranks.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from cotrain_compile.capture.aten import bucket_exchanges
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.plan import Timeline

WIDTH, STEPS = 24, 2


@dataclass(frozen=True)
class Left:
    """The model after some steps, how often a step began each kind of exchange, and the last one.

    `network_s` has the seconds of each exchange on the network of the machine.
    """

    tensors: dict[str, Tensor]
    begun: Counter[str]
    measured: Timeline
    network_s: Mapping[str, float]


def one_by_one_and_in_buckets(rank: int, sharded: bool) -> tuple[Left, Left]:
    """The same training without and with buckets; with running statistics where not `sharded`.

    One by one on a slow network.
    """
    slow = {"throttle": True, "machine": "this-machine network=200kB"}
    with mock.patch.object(bucket_exchanges, "SMALL_BYTES", 0):
        alone = _train(rank, sharded, slow)
    return alone, _train(rank, sharded, {})


def _train(rank: int, sharded: bool, options: Mapping[str, Any]) -> Left:
    torch._dynamo.reset()
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(2):
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
        train, backend="cotrain", options={"quiet": True, **options}
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        step(torch.randn(8, WIDTH, generator=generator))
    placed = cotrain_compile.inspect(step)
    assert placed.measured is not None
    begun = Counter(node.target._opname for node in placed.graph.nodes if is_collective(node))  # type: ignore[union-attr]
    tensors = {name: _whole(t) for name, t in model.state_dict().items()}
    return Left(tensors, begun, placed.measured, placed.problem.costs.network_s)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
