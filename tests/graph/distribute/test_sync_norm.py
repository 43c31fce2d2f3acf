"""SyncBatchNorm in a captured step: statistics, and their gradients, are those of all ranks."""

from __future__ import annotations

import pytest
import torch

from tests.support import synchronised_norms
from tests.support.ranks import Ranks

ROUNDING = 2e-6


@pytest.mark.parametrize("shared", ["ddp", pytest.param("shard", marks=pytest.mark.long)])
def test_ranks_with_synchronised_norms_train_as_one_with_the_whole_batch(
    two_ranks: Ranks, shared: str
) -> None:
    """Eager has no such layer on CPUs: the same rows on one rank are what it is compared with."""
    for held, alone, apart in two_ranks.run(synchronised_norms.train, shared):
        assert held["1.num_batches_tracked"] == synchronised_norms.STEPS
        assert (held["1.weight"] - 1).abs().max() > 1e-4
        for name, value in alone.items():
            assert torch.allclose(held[name], value, atol=ROUNDING), name
        assert apart < ROUNDING
