"""Stages on several ranks each: equal to one process that has the samples of all replicas."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.replicated_stages import PLAN, SWAPPED, Trained, alone, refused, trained


def check(found: list[Trained], reference: Trained) -> None:
    assert [of_rank.replica for of_rank in found] == [0, 1, 0, 1]
    for of_rank in found:
        assert of_rank.losses == [pytest.approx(losses, abs=1e-5) for losses in reference.losses]
        assert of_rank.norms == pytest.approx(reference.norms, rel=1e-5)
    names = [name for of_rank in found for name in of_rank.state]
    assert sorted(names) == sorted([*reference.state, *reference.state])  # each in both replicas
    for of_rank in found:
        for name, value in of_rank.state.items():
            if "running" not in name and "tracked" not in name:  # of each replica's samples
                torch.testing.assert_close(value, reference.state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.long  # stages and replicas are each every run's alone
def test_replicas_of_stages_train_as_one_process(four_ranks: Ranks) -> None:
    """Clipped by the norm of the whole model, each of whose stages counts once."""
    found = four_ranks.run(trained, PLAN, True)
    check(found, alone())
    told = "RanksApart: rank 1: failed: OutOfDeviceMemory: "
    assert [of_rank.overrun.startswith(told) for of_rank in found] == [True, False, True, True]
    for told in four_ranks.run(refused, ("stages", "replicate"), (2, 2)):
        assert "has a mesh of all of them, with the dimension 'pipeline' and others of" in told


@pytest.mark.long
def test_replicas_of_swapped_stages_train_as_one_process(four_ranks: Ranks) -> None:
    check(four_ranks.run(trained, SWAPPED, False), alone())
