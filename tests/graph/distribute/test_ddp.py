"""A step with `DistributedDataParallel`, compiled on two ranks: eager's numbers, within budgets."""

from __future__ import annotations

import itertools

import pytest

from tests.support.ddp_cases import Case, Net, compare
from tests.support.ranks import Ranks

# Buffers, clipping, accumulation, an overflow of one rank alone and values made again in one step,
# beside the resident step and under a budget; each alone, and both optimizers, are the long mode's.
FEW = [Case("adamw", "scaled accumulation", "again")]
ALL = [
    Case(*parts)
    for parts in itertools.product(
        ("sgd", "adamw"),
        ("plain", "clipping", "no_sync", "accumulation", "scaler"),
        ("resident", "budget", "again"),
    )
]
PARAMETERS = 4 * sum(param.numel() for param in Net(again=False).parameters())
BUFFERS = 2 * 4 * 32 + 8


def check(two_ranks: Ranks, cases: list[Case]) -> None:
    of_ranks = [two_ranks.run(compare, case) for case in cases]
    for case, (exchanged, of_the_other) in zip(cases, of_ranks, strict=True):
        assert exchanged == of_the_other, case
        # Gradients are reduced once a step, buffers broadcast with each forward but after no_sync.
        forwards = 2 if case.way.endswith("accumulation") else 1
        assert exchanged["all_reduce"] == PARAMETERS, case
        assert exchanged["broadcast"] == forwards * BUFFERS, case


def test_a_compiled_step_is_that_of_eager_ddp(two_ranks: Ranks) -> None:
    check(two_ranks, FEW)


@pytest.mark.long
def test_every_way_optimizer_and_memory_is_that_of_eager_ddp(two_ranks: Ranks) -> None:
    check(two_ranks, ALL)
