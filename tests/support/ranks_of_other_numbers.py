"""Steps of two ranks, of which one computes with other numbers, or has other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile.errors import RanksApart

OPTIONS: dict[str, Any] = {"quiet": True, "policy": "zero-offload", "check_replicas": 2}


def clipped_apart(rank: int) -> str:
    """What a rank is told where they clip at different norms."""
    return _told(_training(clip=0.1 if rank else 1.0)[0])


def decayed_apart(rank: int) -> str:
    """What a rank is told where their groups have different settings."""
    return _told(_training(weight_decay=0.5 if rank else 0.01)[0])


def changed_between(rank: int) -> tuple[list[str], list[str]]:
    """What a rank is told in each step after one has another rate, then after one edits a bias."""
    run, model, optimizer = _training()
    for _ in range(2):
        run()
        optimizer.param_groups[0]["lr"] *= 0.9
    run()
    optimizer.param_groups[0]["lr"] = 0.3 if rank else 0.1
    of_rates = [_told(run)]
    optimizer.param_groups[0]["lr"] = 0.1
    of_rates.append(_told(run))
    with torch.no_grad():
        model.module.bias.add_(rank)
    return of_rates, [_told(run) for _ in range(3)]


def _training(clip: float = 1.0, weight_decay: float = 0.01) -> tuple[Callable[[], Any], Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=weight_decay)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    compiled: Any = torch.compile(step, backend="cotrain", options=OPTIONS)
    return lambda: compiled(torch.ones(4, 8), torch.zeros(4, dtype=torch.long)), model, optimizer


def _told(run: Callable[[], Any]) -> str:
    try:
        run()
    except RanksApart as error:
        return str(error)
    return ""
