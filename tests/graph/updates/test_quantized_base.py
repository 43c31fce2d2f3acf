"""Adapters over frozen weights that torchao has made of int8 codes and scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.errors import CaptureError
from cotrain_compile.machine import Tier
from tests.support.steps import cotrain

WIDTH, HIDDEN, RANK = 64, 128, 4
Run = Callable[[Tensor, Tensor], Tensor]


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return y


def adapted(*, frozen: bool = True) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    base = nn.Sequential(first, second).requires_grad_(False)
    quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
    first.weight.requires_grad_(not frozen)
    return nn.Sequential(Adapter(first), nn.GELU(), Adapter(second))


def losses(compile_with: Callable[[Run], Run]) -> list[Tensor]:
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # of frozen ones, too
        optimizer.step()
        return loss.detach()

    run = compile_with(step)
    torch.manual_seed(1)
    return [run(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]


@pytest.mark.parametrize("policy", ["resident", "zero-offload"])
def test_adapters_over_codes_train_as_in_eager(policy: str) -> None:
    torch.testing.assert_close(losses(cotrain(policy=policy)), losses(lambda step: step))


def test_codes_leave_the_device_within_a_budget() -> None:
    compiled: list[Any] = []

    def keep(step: Run) -> Run:
        compiled.append(cotrain(policy="greedy", memory_budget=60 << 10)(step))
        return compiled[0]  # type: ignore[no-any-return]

    torch.testing.assert_close(losses(keep), losses(lambda step: step))
    plan = cotrain_compile.inspect(compiled[0]).plan
    offloaded = {name for name, tier in plan.placement.homes.items() if tier is Tier.HOST}
    assert {f"0.base.weight.{part}" for part in ("qdata", "scale")} & offloaded


def test_codes_that_are_trained_are_refused_with_the_way_on() -> None:
    model = adapted(frozen=False)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    with pytest.raises(CaptureError, match=r"Int8Tensor, .*requires_grad_\(False\)"):
        cotrain()(step)(torch.ones(2, WIDTH))
