"""A model with SyncBatchNorm on several ranks, and the same on one that has all of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile

STEPS, ROWS = 3, 6


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Flatten(), nn.Linear(32, 4)
    )


def _rows(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ranks = dist.get_world_size()
    x = torch.randn(ROWS * ranks, 3, 6, generator=generator) + torch.arange(3).view(1, 3, 1)
    return x, torch.randint(0, 4, (ROWS * ranks,), generator=generator)


def train(rank: int, shared: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """What the model holds after some steps on this rank, and on one alone with the whole batch.

    The last value is what validations of both differ by.
    """
    alone = _model()
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    model: Any
    if shared == "ddp":  # whose constructor takes the layer on cards alone
        model = DistributedDataParallel(_model())
        model.module = convert(model.module)
    else:
        model = cotrain_compile.shard(convert(_model()))
    step = torch.compile(_step(model), backend="cotrain", options={"quiet": True})
    expected = _step(alone)
    for number in range(STEPS):
        x, y = _rows(number)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        step(x[mine], y[mine])
        expected(x, y)
    held = {
        name.removeprefix("module."): value.full_tensor()
        if hasattr(value, "full_tensor")
        else value
        for name, value in model.state_dict().items()
    }
    with torch.no_grad():
        apart = (model.eval()(x) - alone.eval()(x)).abs().max().item()
    return held, alone.state_dict(), apart


def _step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
