"""Code as a typed user of the package writes it, for `make published`: pyright must accept it."""

from __future__ import annotations

from pathlib import Path

import torch

import cotrain_compile
from cotrain_compile import errors, files
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Plan


def train(model: torch.nn.Module, batch: torch.Tensor) -> float:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = cotrain_compile.compile(step, memory_budget="20GiB", quiet=True)
    try:
        loss: torch.Tensor = compiled(batch)
    except errors.PlacementError as refusal:
        missing: int = refusal.shortfall_bytes
        raise MemoryError(missing) from refusal
    placed = cotrain_compile.inspect(compiled)
    peak: int = placed.predicted.peak_bytes[Tier.DEVICE]
    numbers: dict[str, float] = cotrain_compile.scalars(compiled, tokens=8)
    assert peak <= placed.plan.budgets[Tier.DEVICE], numbers
    return loss.item()


def saved(path: Path) -> float:
    return files.load(path, Plan).predicted.makespan_s
