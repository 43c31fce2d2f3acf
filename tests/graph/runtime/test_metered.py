"""A metered graph computes what the graph does, and holds no value longer than it is needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from cotrain_compile.errors import OutOfDeviceMemory
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.runtime.meter import MemoryMeter, MeteredGraph

NBYTES = 4 * 1024


def three_in_a_row(x: Tensor) -> Tensor:
    torch.mul(x, 7)  # nobody reads it
    return torch.exp(torch.neg(torch.add(x, 1)))


def run(budget_bytes: int) -> tuple[Tensor, MemoryMeter]:
    graph = MeteredGraph(fx.symbolic_trace(three_in_a_row), Tier.HOST)
    meter = MemoryMeter({Tier.HOST: budget_bytes, Tier.DEVICE: 0})
    result: Tensor = graph([torch.ones(1024)], meter)
    return result, meter


def test_a_value_is_gone_after_its_last_use() -> None:
    result, meter = run(2 * NBYTES)
    torch.testing.assert_close(result, torch.full((1024,), -2.0).exp())
    assert meter.peak_bytes == {**dict.fromkeys(Tier, 0), Tier.HOST: 2 * NBYTES}
    assert meter.used_bytes[Tier.HOST] == NBYTES  # the result, which we hold


def test_the_op_that_passes_the_budget_is_named() -> None:
    with pytest.raises(OutOfDeviceMemory, match="out of memory on the host at neg"):
        run(2 * NBYTES - 1)


def test_a_constant_of_the_graph_is_there_for_every_run() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.tensor(3.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(x * self.factor, x)

    graph = MeteredGraph(fx.symbolic_trace(Scaled()), Tier.HOST)
    meter = MemoryMeter(dict.fromkeys(MEMORIES, 1 << 20))
    for _ in range(2):
        assert graph([torch.ones(())], meter).item() == 4.0
