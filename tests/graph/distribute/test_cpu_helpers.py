"""Two workers and one CPU helper: sums, bytes, training by the example, and faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import helped_ranks
from tests.support.example_scripts import example, trained_alone
from tests.support.ranks import Ranks


def test_whole_numbers_are_those_of_an_all_reduce_and_bytes_those_of_the_plan(
    three_ranks: Ranks,
) -> None:
    for rank, (found, wanted, sent, planned) in enumerate(three_ranks.run(helped_ranks.integers)):
        assert sent == planned > 0
        assert len(found) == (0 if rank == 2 else 3)
        for one, other in zip(found, wanted, strict=False):
            assert torch.equal(one, other)


@pytest.mark.long
def test_workers_of_a_machine_send_one_copy_of_their_sums(five_ranks: Ranks) -> None:
    """Two machines of two workers each; each of these brings every other round."""
    *workers, (_, _, helped, planned) = five_ranks.run(helped_ranks.integers, 1, 2)
    assert helped == planned > 0
    for found, wanted, sent, planned in workers:
        assert sent == planned > 0
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def test_gradients_go_while_the_backward_makes_others(three_ranks: Ranks) -> None:
    *workers, (found, _, (sent, planned)) = three_ranks.run(helped_ranks.beside_backward)
    assert (found, sent) == ([], planned)
    for means, wanted, (early, sent, planned) in workers:
        assert 0 < early < sent == planned
        torch.testing.assert_close(means, wanted)


def test_a_layer_waits_for_its_own_sums_before_its_next_forward(three_ranks: Ranks) -> None:
    """When a forward comes to its first layer, not all of the exchange before has gone."""
    *workers, _ = three_ranks.run(helped_ranks.ahead_of_forward)
    for found, wanted, sent in workers:
        torch.testing.assert_close(found, wanted)
        assert sent == sorted(sent)
        assert sent[0] < sent[4] <= sent[-1]


def test_the_example_trains_as_one_process_does(three_ranks: Ranks, tmp_path: Path) -> None:
    losses, state = trained_alone(example("cpu_helpers"), 2)
    first, second, helper = three_ranks.run(helped_ranks.trained, tmp_path)
    assert helper == []
    torch.testing.assert_close(list(zip(first, second, strict=True)), losses)
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), state, rtol=1e-5, atol=1e-6)


def test_a_worker_that_fails_ends_all_ranks(three_ranks: Ranks) -> None:
    first, second, helper = three_ranks.run(helped_ranks.one_fails)
    assert second == "ArithmeticError: a bad batch"
    assert first == helper
    assert first.startswith("RanksApart: rank 1 has failed, so no rank goes on")


def test_a_worker_with_fewer_batches_ends_all_ranks(three_ranks: Ranks) -> None:
    for told in three_ranks.run(helped_ranks.one_is_done_early):
        assert told.startswith("RanksApart: ranks [1] are done")


def test_ranks_with_other_models_are_refused(three_ranks: Ranks) -> None:
    for told in three_ranks.run(helped_ranks.other_models):
        assert told.startswith("RanksApart: ")
        assert "9 parameters" in told
