"""Small exchanges go in buckets: fewer collectives, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile.capture.aten.bucket_exchanges import SMALL_BYTES
from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.entry.tracing import trace
from cotrain_compile.plan import Lane
from cotrain_compile.plan.timeline import exchange_of
from tests.support.bucketed_ranks import Left, one_by_one_and_in_buckets
from tests.support.ranks import Ranks

WIDE = SMALL_BYTES // 4  # elements of what just goes into a bucket
LAYERS = 8
TIMER_S = 0.001  # a sleep may end this much early


class Layer(nn.Module):
    """A large weight between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.large = nn.Parameter(torch.ones(WIDE + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.after(self.before(x) * self.large.sum())
        return out


def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = DistributedDataParallel(nn.Sequential(*(Layer() for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    return step, (torch.ones(2, 4),)


def micro_batches() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Two forwards: the second one broadcasts what the first one brought."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for part in x.chunk(2):
            F.mse_loss(model(part), part).backward()
        optimizer.step()

    return step, (torch.ones(4, 4),)


def test_what_an_exchange_brought_is_in_no_bucket_with_it() -> None:
    exchanges = [op.collective for op in begun(trace(micro_batches, ranks=8))]
    sent = [exchange.nbytes for exchange in exchanges if exchange and exchange.kind == "broadcast"]
    # The mean and variance in one bucket before each forward, and the count, of another dtype.
    assert sent == [2 * 4 * 4, 8] * 2


@pytest.fixture(scope="module")
def step() -> Dataflow:
    return trace(build, ranks=8)


def begun(step: Dataflow) -> list[Op]:
    return [op for op in step.ops if op.collective is not None]


def test_small_gradients_go_in_one_bucket_and_large_ones_alone(step: Dataflow) -> None:
    exchanges = [op.collective for op in begun(step)]
    sizes = sorted(exchange.nbytes for exchange in exchanges if exchange is not None)
    of_small = LAYERS * 2 * 4 * (16 + 4)
    assert sizes == [of_small] + LAYERS * [4 * (WIDE + 1)]


def test_a_bucket_begins_when_its_last_gradient_is_complete(step: Dataflow) -> None:
    bucket = min(begun(step), key=lambda op: op.collective.nbytes if op.collective else 0)
    (flat,) = [op for op in step.ops if "cat" in op.target and set(op.writes) & set(bucket.reads)]
    made = {name: i for i, op in enumerate(step.ops) for name in op.writes}
    last = max(made[name] for name in flat.reads)
    between = step.ops[last + 1 : step.position[bucket.name]]
    assert not [op for op in between if op.flops]


def test_the_update_of_each_parameter_has_a_gradient_of_its_own(step: Dataflow) -> None:
    """What comes out of a bucket is in memory of its own: a plan sends each where it wants."""
    gradients = [group.gradient for group in step.updates]
    assert len(set(gradients)) == len(gradients) == 5 * LAYERS


def _check_measured(alone: Left) -> None:
    """Exchanges took turns, and what the network needs; the last wait ended when it was done.

    The device went on beside means of gradients, which are waited for late.
    """
    network = alone.measured.lane(Lane.NETWORK)
    assert {span.name for span in network} == set(map(exchange_of, alone.network_s))
    seconds = {exchange_of(op): taken for op, taken in alone.network_s.items()}
    assert all(s.end_s - s.start_s >= 0.999 * seconds[s.name] > 0 for s in network)
    assert all(before.end_s <= after.start_s for before, after in pairwise(network))
    waits = [s for s in alone.measured.lane(Lane.DEVICE) if s.name.startswith("wait_tensor")]
    assert len(waits) == len(network)
    assert max(s.end_s for s in waits) >= network[-1].end_s - TIMER_S
    ops = [span.name for span in alone.measured.lane(Lane.DEVICE)]
    behind = [ops[ops.index(name) + 1] for name in ops if name.startswith("all_reduce")]
    assert not behind or not all(name.startswith("wait_tensor") for name in behind)


def _check(of_ranks: list[tuple[Left, Left]], kinds: set[str], rounding: float) -> None:
    for alone, together in of_ranks:
        _check_measured(alone)
        assert set(together.begun) == set(alone.begun) == kinds
        assert 3 * sum(together.begun.values()) < 2 * sum(alone.begun.values())
        for name, value in alone.tensors.items():
            torch.testing.assert_close(together.tensors[name], value, rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("sharded", "kinds"),
    [
        pytest.param(False, {"all_reduce", "broadcast"}, marks=pytest.mark.long),
        (True, {"all_gather_into_tensor", "reduce_scatter_tensor"}),
    ],
)
def test_two_ranks_find_the_same_bits_in_a_bucket(
    two_ranks: Ranks, sharded: bool, kinds: set[str]
) -> None:
    _check(two_ranks.run(one_by_one_and_in_buckets, sharded), kinds, 0.0)


@pytest.mark.long
def test_three_ranks_find_the_same_up_to_the_order_of_a_sum(three_ranks: Ranks) -> None:
    kinds = {"all_reduce", "broadcast"}
    _check(three_ranks.run(one_by_one_and_in_buckets, False), kinds, 1e-6)
