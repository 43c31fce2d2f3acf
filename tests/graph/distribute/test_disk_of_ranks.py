"""Ranks whose states rest on disk: each in files of its own in one folder, trained as without."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile import shard
from cotrain_compile.entry.compiled import inspect
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.disk.state_files import file_of
from tests.support.ranks import Ranks

# Of each rank's part of the last weight a state has one piece more than there are rooms.
WIDTHS = (16, 2400, 3000)
PARAM_BYTES = sum(a * b * 4 for a, b in pairwise(WIDTHS))
PARTS = {"replicate": 1, "shard": 2}
OPTIONS: dict[str, Any] = {
    "machine": "rtx4090",
    "policy": "zero-offload",
    "memory_budget": "1GiB",
    "plan_cache": False,
    "quiet": True,
}


class Trained(NamedTuple):
    """What a rank ends with."""

    losses: list[float]
    params: list[Tensor]
    files: int
    disk_bytes: int


def train(rank: int, how: str, options: dict[str, Any]) -> Trained:
    """Two steps of a rank on its own samples."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    *widths, last = WIDTHS
    layers = [nn.Linear(a, b) for a, b in pairwise([*widths, PARTS[how] * last])]
    model: nn.Module = nn.Sequential(*layers)
    model = shard(model) if how == "shard" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="cotrain", options={**OPTIONS, **options})
    samples = torch.Generator().manual_seed(rank)
    losses = [float(compiled(torch.randn(4, WIDTHS[0], generator=samples))) for _ in range(2)]
    states = [_local(t) for state in optimizer.state.values() for t in state.values()]
    files = {id(file) for t in states if (file := file_of(t)) is not None}
    measured = inspect(compiled).measured
    assert measured is not None
    params = [_local(p).detach().clone() for p in model.parameters()]
    return Trained(losses, params, len(files), measured.peak_bytes.get(Tier.DISK, 0))


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


@pytest.mark.long
@pytest.mark.parametrize("how", PARTS)
def test_ranks_have_files_of_their_own_in_one_folder(
    two_ranks: Ranks, tmp_path: Path, how: str
) -> None:
    without = two_ranks.run(train, how, {})
    room = 8 * PARAM_BYTES - (2 << 20)
    with_disk = two_ranks.run(train, how, {"disk": str(tmp_path), "host_memory_budget": room})
    for found, expected in zip(with_disk, without, strict=True):
        assert (found.files, expected.files) == (2, 0)
        assert found.disk_bytes >= 8 * WIDTHS[1] * WIDTHS[2]
        assert found.losses == expected.losses
        assert all(torch.equal(a, b) for a, b in zip(found.params, expected.params, strict=True))
    assert not list(tmp_path.iterdir())
