"""Ranks whose weights rest on disk, in one folder: files of their own, numbers as in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.graph.updates.test_weights_on_disk import HELD, WEIGHT_BYTES, Training
from tests.support.ranks import Ranks


def differing(rank: int, folder: str, host_bytes: int) -> tuple[int, int]:
    """How many files a rank has in `folder`, and of how many tensors it has others without."""
    options: dict[str, Any] = {"ranks": True, "host_memory_budget": host_bytes}
    with_disk = Training(**options, disk=folder)
    with_disk.train(range(2), rank)
    without = Training(**{**options, "host_memory_budget": "1GiB"})
    without.train(range(2), rank)
    pairs = zip(with_disk.tensors, without.tensors, strict=True)
    return len(with_disk.files), sum(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.long
def test_ranks_in_one_folder_have_files_of_their_own(two_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = two_ranks.run(differing, str(tmp_path), round(HELD * WEIGHT_BYTES))
    assert of_ranks == [(1, 0)] * 2
    assert not list(tmp_path.iterdir())
