"""Whatever ranks do between steps, all train as one process does, or all are told and go on."""

from __future__ import annotations

import pytest

from tests.support.rank_sequences import Act, RankSequence, played, sequence_of
from tests.support.ranks import Ranks

# A part that one rank edits is its own; a setting is not, nor is a replica.
SHARDED = RankSequence("shard", "sgd", (Act("call"), Act("edit", 0), Act("weight_decay", 1)))
REPLICAS = RankSequence("ddp", "sgd", (Act("call"), Act("edit", 1), Act("bad index", 0)))
# A number that one rank alone has changed is an input there, and is told with the way on.
NUMBER = RankSequence("fully_shard", "adamw", (Act("call"), Act("scale", 1), Act("load")))
# One that all have changed is an input of theirs, of which one rank gives another later. Replicas
# that are clipped to it are compared as before.
CLIP = RankSequence("ddp", "sgd", (Act("call"), Act("clip"), Act("edit", 1), Act("clip", 0)))
# What was saved before the first step has no moments, which are put back.
LOAD = RankSequence("ddp", "adamw", (Act("call"), Act("load", 1)))
# One rank waits for an exchange that the other has not come to.
BETWEEN = RankSequence("shard", "sgd", (Act("call"), Act("bad index", 0), Act("call")))


def check(ranks: Ranks, sequence: RankSequence) -> bool:
    """Whether the ranks were told to start again, and are stopped."""
    of_ranks = ranks.run(played, sequence)
    assert [found.wrong for found in of_ranks] == [""] * ranks.count
    is_over: bool = of_ranks[0].is_over
    if is_over:
        ranks.stop()
    return is_over


@pytest.mark.parametrize(
    "sequence", [SHARDED, pytest.param(REPLICAS, marks=pytest.mark.long)], ids=["shard", "ddp"]
)
def test_all_ranks_train_or_all_are_told(two_ranks: Ranks, sequence: RankSequence) -> None:
    check(two_ranks, sequence)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sequence", "is_over"), [(NUMBER, False), (CLIP, False), (LOAD, False), (BETWEEN, True)]
)
def test_the_way_on_is_the_one_that_helps(
    two_ranks: Ranks, sequence: RankSequence, is_over: bool
) -> None:
    assert check(two_ranks, sequence) is is_over


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_many_sequences_on_two_ranks(two_ranks: Ranks, seed: int) -> None:
    check(two_ranks, sequence_of(seed, 2))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_sequences_on_three_ranks(three_ranks: Ranks, seed: int) -> None:
    check(three_ranks, sequence_of(seed, 3))
