"""Sharded steps: two ranks train as in eager FSDP2, with each rank's step planned as any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cotrain_compile import shard
from cotrain_compile.errors import DistributeError
from tests.support.ranks import Ranks
from tests.support.sharded_training import Training, furthest, train

# Of values about 1, in a few steps.
ROUNDING = 2e-6


def test_ranks_train_as_in_eager_fsdp2(two_ranks: Ranks) -> None:
    """With a tied and a frozen weight, clipping, and a norm over all ranks."""
    eager = two_ranks.run(train, Training("fully_shard", "clipped"))
    ours = two_ranks.run(train, Training("shard", "clipped", options={}))
    for found, expected in zip(ours, eager, strict=True):
        assert found.losses == pytest.approx(expected.losses, abs=ROUNDING)
        assert furthest(found, expected) < ROUNDING


def test_a_sharded_model_trains_in_eager_as_well(two_ranks: Ranks) -> None:
    eager = two_ranks.run(train, Training("fully_shard", "accumulated", "adamw"))
    sharded = two_ranks.run(train, Training("shard", "accumulated", "adamw"))
    for found in sharded:
        assert furthest(found, eager[0]) < ROUNDING


@pytest.mark.long
def test_micro_batches_are_added_up_as_in_eager(two_ranks: Ranks) -> None:
    eager = two_ranks.run(train, Training("fully_shard", "accumulated", "adamw"))
    for found in two_ranks.run(train, Training("shard", "accumulated", "adamw", {})):
        assert furthest(found, eager[0]) < ROUNDING


def test_shards_are_moved_and_updated_on_the_host_bitwise_equal(two_ranks: Ranks) -> None:
    resident = two_ranks.run(train, Training("shard", "clipped", "adamw", {}, bare=True))
    budget = resident[0].predicted_peak * 6 // 10
    options = {"memory_budget": budget, "host_kernels": "captured"}
    placed = two_ranks.run(train, Training("shard", "clipped", "adamw", options, bare=True))
    for found, expected in zip(placed, resident, strict=True):
        assert found.plan["host updates"] > 0
        # Below its budget, a peak has what a thread of gloo lets go of a moment late.
        assert max(found.measured_peak, found.predicted_peak) <= budget
        assert found.losses == expected.losses
        assert all(torch.equal(found.params[name], expected.params[name]) for name in found.params)


def _outputs_of_lstm(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4)
    x = torch.ones(2, 3, 4)
    whole: torch.Tensor = lstm(x)[0]
    sharded: torch.Tensor = shard(lstm)(x)[0]
    return whole.detach(), sharded.detach()


def test_a_layer_that_keeps_its_weights_twice_reads_the_gathered_ones(two_ranks: Ranks) -> None:
    for whole, sharded in two_ranks.run(_outputs_of_lstm):
        assert torch.equal(whole, sharded)


def test_each_rank_rests_an_equal_part(rank_of_two: None) -> None:
    """Along the first dimension that can be split equally; whole where there is none."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    before = {name: value.shape for name, value in model.state_dict().items()}
    shard(model)
    local = {name: tuple(value.to_local().shape) for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in model.state_dict().items()} == before
    assert local == {
        "0.weight": (2, 3),
        "0.bias": (2,),
        "1.weight": (3, 2),
        "1.bias": (3,),
        "2.weight": (3,),
        "2.bias": (3,),
    }


def test_outside_a_forward_a_parameter_is_its_part(rank_of_two: None) -> None:
    """So that what initialises it writes what rests."""
    model = shard(nn.Linear(4, 4))
    nn.init.ones_(model.weight)
    assert model.weight.to_local().eq(1).all()  # type: ignore[attr-defined]


def test_without_a_process_group_shard_says_how_to_start() -> None:
    with pytest.raises(DistributeError, match=r"torchrun, and call torch\.distributed\.init"):
        shard(nn.Linear(4, 4))


def test_what_cannot_be_sharded_is_refused_in_words(rank_of_two: None) -> None:
    model = shard(nn.Linear(4, 4))
    with pytest.raises(DistributeError, match="weight is a DTensor already"):
        shard(model)
    with pytest.raises(DistributeError, match="0 is a DistributedDataParallel; give shard"):
        shard(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4))))
    with pytest.raises(DistributeError, match="3 dimensions, and shard\\(\\) takes one"):
        shard(nn.Linear(4, 4), init_device_mesh("cpu", (1, 1, 2)))
    holder = nn.Linear(4, 4)
    holder.mine = [holder.weight]  # type: ignore[assignment]
    with pytest.raises(DistributeError, match=r"the model\.mine holds parameters beside"):
        shard(holder)
