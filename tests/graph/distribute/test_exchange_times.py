"""Gathers begin early and scatters are awaited late, within a few of them and their bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cotrain_compile import shard
from cotrain_compile.capture.aten import bucket_exchanges
from cotrain_compile.capture.aten.exchange_times import MOST_TIMES_LARGEST, MOST_UNDER_WAY
from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.tracing import trace

LAYERS = 7


def build() -> tuple[Any, tuple[Any, ...]]:
    """Layers of one size, but for a large one in the middle."""
    widths = [8, 8, 8, 64, 8, 8, 8, 8]
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
    model = shard(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    return step, (torch.ones(2, 8),)


@pytest.fixture(scope="module")
def step() -> Dataflow:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_exchanges, "SMALL_BYTES", 0)
        return trace(build, ranks=2)


def under_way(step: Dataflow, kind: str) -> list[set[str]]:
    """The exchanges of a kind that are under way behind each op."""
    found, begun = [], set[str]()
    for op in step.ops:
        if op.collective is not None and kind in op.collective.kind:
            begun = begun | {op.name}
        begun = begun - {op.awaits}
        found.append(begun)
    return found


def nbytes(step: Dataflow, name: str) -> int:
    exchange = step.ops[step.position[name]].collective
    assert exchange is not None
    return exchange.nbytes


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_the_device_works_while_a_few_are_under_way(step: Dataflow, kind: str) -> None:
    of_kind = under_way(step, kind)
    largest = max(nbytes(step, name) for names in of_kind for name in names)
    assert len({name for names in of_kind for name in names}) == LAYERS
    beside = [names for op, names in zip(step.ops, of_kind, strict=True) if op.flops]
    assert sum(bool(names) for names in beside) >= LAYERS - 2
    assert 1 < max(map(len, of_kind)) <= MOST_UNDER_WAY
    most = max(sum(nbytes(step, name) for name in names) for names in of_kind)
    assert most <= MOST_TIMES_LARGEST * largest


def test_what_a_gather_or_scatter_reads_is_in_use_until_it_is_awaited(step: Dataflow) -> None:
    waits = [op for op in step.ops if op.awaits]
    assert len(waits) == 2 * LAYERS
    for wait in waits:
        begun: Op = step.ops[step.position[wait.awaits]]
        given = [name for name in begun.reads if step.buffer[name].nbytes]
        assert set(given) <= set(wait.reads)
