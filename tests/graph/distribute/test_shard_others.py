"""Sharded in other ways: unequal parts, tensor parallel layers, updates of whole matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cotrain_compile.errors import CaptureError
from tests.support.ranks import Ranks
from tests.support.sharded_training import (
    OPTIMIZERS,
    Net,
    Training,
    batch,
    furthest,
    step_of,
    train,
    whole,
)

ROUNDING = 2e-6


def test_parts_of_unequal_size_are_planned_on_each_rank_for_itself(three_ranks: Ranks) -> None:
    """Eight rows on three ranks: collectives keep the step's order whatever each rank moves."""
    uneven = Training("fully_shard", "clipped", "adamw", size=8, bare=True)
    eager = three_ranks.run(train, uneven)
    for found in three_ranks.run(train, replace(uneven, options={"memory_budget": 5000})):
        assert found.plan["host updates"] > 0
        assert max(found.measured_peak, found.predicted_peak) <= 5000
        assert furthest(found, eager[0]) < ROUNDING


def test_an_update_that_needs_the_whole_matrix_gets_it(two_ranks: Ranks) -> None:
    whole_matrices = Training("fully_shard", optimizer="muon", bare=True)
    eager = two_ranks.run(train, whole_matrices)
    budget = {"memory_budget": 15_000}
    for found in two_ranks.run(train, replace(whole_matrices, options=budget)):
        assert found.plan["transfers"] > 0
        assert furthest(found, eager[0]) < ROUNDING


def _tensor_parallel(net: Net, mesh: DeviceMesh) -> None:
    parallelize_module(net.block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _split_in_layers(rank: int, parallel: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Net()
    if parallel:
        _tensor_parallel(net, init_device_mesh("cpu", (2,)))
    optimizer = OPTIMIZERS["adamw"]([p for p in net.parameters() if p.requires_grad])
    step = step_of(net, optimizer, "clipped together" if parallel else "clipped")
    if parallel:
        options: dict[str, Any] = {"memory_budget": 14_000, "quiet": True}
        step = torch.compile(step, backend="cotrain", options=options)
    for number in range(3):
        step(*batch(number, 0))
    return whole(net.state_dict())


@pytest.mark.long  # in every run such layers are split and sharded on four ranks
def test_tensor_parallel_layers_train_as_on_one_rank(two_ranks: Ranks) -> None:
    alone = _split_in_layers(0, parallel=False)
    for found in two_ranks.run(_split_in_layers, True):
        assert all(torch.allclose(found[name], alone[name], atol=ROUNDING) for name in alone)


@pytest.mark.parametrize(
    ("way", "optimizer", "told"),
    [
        (
            "clipped",
            "sgd",
            r"_foreach_norm\.Scalar gets sharded and whole tensors, .* take them apart",
        ),
        ("plain", "adafactor", "cannot be done on a shard of a tensor"),
    ],
)
def test_what_torch_cannot_do_on_shards_is_refused_in_words(
    rank_of_two: None, way: str, optimizer: str, told: str
) -> None:
    net = Net()
    _tensor_parallel(net, init_device_mesh("cpu", (2,)))
    params = [p for p in net.parameters() if p.requires_grad]
    step = step_of(net, OPTIMIZERS[optimizer](params), way)
    with pytest.raises(CaptureError, match=told):
        torch.compile(step, backend="cotrain")(*batch(0, 0))
