"""Layers of different widths on three ranks: losses and parameters are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import wide_ranks
from tests.support.example_scripts import example, trained_alone
from tests.support.pipelines import alone
from tests.support.ranks import Ranks
from tests.support.wide_ranks import LAYERS


@pytest.mark.long  # the example does so in every run
def test_gpt2_trains_as_one_process_does(three_ranks: Ranks) -> None:
    wanted = alone("gpt2", 1)
    found = three_ranks.run(wide_ranks.trained_gpt2, {f"{LAYERS}.0": 1, f"{LAYERS}.1": 2})
    for rank in found:
        torch.testing.assert_close(rank.losses, wanted.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0].state, dict(wanted.state), rtol=1e-4, atol=1e-5)


def test_sums_begin_while_the_backward_makes_other_gradients(two_ranks: Ranks) -> None:
    for early, in_all in two_ranks.run(wide_ranks.sums_begun):
        assert 0 < early < in_all


def test_the_example_trains_as_one_process_does(three_ranks: Ranks, tmp_path: Path) -> None:
    wanted, state = trained_alone(example("burst"), 1)
    for losses in three_ranks.run(wide_ranks.trained_example, tmp_path):
        torch.testing.assert_close([(loss,) for loss in losses], wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_that_fails_in_a_step_is_told_to_all_which_may_go_on(
    three_ranks: Ranks, place: str
) -> None:
    wanted, _ = trained_alone(example("burst"), 1, steps=2)
    found = three_ranks.run(wide_ranks.fails_and_goes_on, place)
    for rank, (told, has_gradient, losses) in enumerate(found):
        if rank == 1:
            assert told == "ArithmeticError: a bad batch"
        else:
            assert told.startswith("RanksApart: ")
            assert "rank 1: failed: ArithmeticError: a bad batch" in told
        assert not has_gradient
        torch.testing.assert_close([(loss,) for loss in losses], wanted, rtol=1e-5, atol=1e-6)


def test_ranks_with_other_widths_are_refused(three_ranks: Ranks) -> None:
    for told in three_ranks.run(wide_ranks.other_plans):
        assert told.startswith("RanksApart: ")
        assert "has widths {'0': 2, '2': 2}" in told
