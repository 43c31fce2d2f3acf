"""Two workers and one CPU helper: sums, bytes, training by the example, and faults."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from tests.support import helped_ranks
from tests.support.helped_ranks import example
from tests.support.ranks import Ranks


def test_whole_numbers_are_those_of_an_all_reduce_and_bytes_those_of_the_plan(
    three_ranks: Ranks,
) -> None:
    for rank, (found, wanted, sent, planned) in enumerate(three_ranks.run(helped_ranks.integers)):
        assert sent == planned > 0
        assert len(found) == (0 if rank == 2 else 3)
        for one, other in zip(found, wanted, strict=False):
            assert torch.equal(one, other)


def test_the_example_trains_as_one_process_does(three_ranks: Ranks, tmp_path: Path) -> None:
    code = example("cpu_helpers")
    model = code.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone = []
    for number in range(3):
        optimizer.zero_grad()
        losses = []
        for rank in range(2):
            x, y = code.batch(number, rank)
            loss = F.cross_entropy(model(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        alone.append(losses)
    first, second, helper = three_ranks.run(helped_ranks.trained, tmp_path)
    assert helper == []
    torch.testing.assert_close(list(zip(first, second, strict=True)), [tuple(p) for p in alone])
    torch.testing.assert_close(
        torch.load(tmp_path / "model.pt"), dict(model.state_dict()), rtol=1e-5, atol=1e-6
    )


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
