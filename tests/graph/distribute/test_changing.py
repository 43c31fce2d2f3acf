"""Trainings on two ranks that change on the way, or are planned or compiled in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.changing_trainings import BUDGET, made_again, scheduled
from tests.support.ranks import Ranks

ROUNDING = 2e-6
# Compiled code may use other instructions.
ROUNDING_OF_INDUCTOR = 2e-5


def check(ranks: Ranks, shared: tuple[str, str], options: dict[str, Any], most: float) -> None:
    eager, _ = ranks.run(scheduled, shared[0], None)
    for found in ranks.run(scheduled, shared[1], options):
        assert all(torch.allclose(found[name], eager[name], atol=most) for name in eager)


@pytest.mark.long
def test_a_schedule_and_another_batch_size_go_on_with_shards(two_ranks: Ranks) -> None:
    check(two_ranks, ("fully_shard", "shard"), {"memory_budget": BUDGET}, ROUNDING)


@pytest.mark.long  # what a user's checkpoint makes again is every run's in `test_ddp`
def test_values_that_a_plan_makes_again_are_the_same_under_ddp(two_ranks: Ranks) -> None:
    """Nothing can go to the host: only what is made again gives memory."""
    for again, apart in two_ranks.run(made_again):
        assert again > 0
        assert apart == 0


@pytest.mark.long  # Inductor compiles every segment on both ranks
def test_compiled_code_under_ddp_is_that_of_eager(two_ranks: Ranks) -> None:
    check(two_ranks, ("ddp", "ddp"), {"lowering": "inductor"}, ROUNDING_OF_INDUCTOR)
