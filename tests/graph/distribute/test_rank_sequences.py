"""Whatever ranks do between steps, all train as one process does, or all are told and go on."""

from __future__ import annotations

import pytest

from tests.support.rank_sequences import Act, RankSequence, played, sequence_of
from tests.support.ranks import Ranks

# A part that one rank edits is its own; a setting is not, nor is a replica.
SHARDED = RankSequence("shard", "sgd", (Act("call"), Act("edit", 0), Act("weight_decay", 1)))
REPLICAS = RankSequence("ddp", "sgd", (Act("call"), Act("edit", 1), Act("bad index", 0)))


def check(ranks: Ranks, sequence: RankSequence) -> None:
    assert [found.wrong for found in ranks.run(played, sequence)] == [""] * ranks.count


@pytest.mark.parametrize("sequence", [SHARDED, REPLICAS], ids=["shard", "ddp"])
def test_all_ranks_train_or_all_are_told(two_ranks: Ranks, sequence: RankSequence) -> None:
    check(two_ranks, sequence)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_many_sequences_on_two_ranks(two_ranks: Ranks, seed: int) -> None:
    check(two_ranks, sequence_of(seed, 2))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_sequences_on_three_ranks(three_ranks: Ranks, seed: int) -> None:
    check(three_ranks, sequence_of(seed, 3))
