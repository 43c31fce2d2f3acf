"""The whole model on two ranks, within a budget, layers run for all micro-batches: the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.example_scripts import example, trained_alone
from tests.support.ranks import Ranks


def trained(rank: int, folder: Path) -> Any:
    code: Any = example("replicas")
    code.MICRO_BATCHES = 2  # each of them is traced
    return code.train(3, "150KiB", "by-layer", folder / "model.pt")


def test_micro_batches_by_layer_train_as_one_process_does(two_ranks: Ranks, tmp_path: Path) -> None:
    """Harmony's data parallelism; gradients are exchanged once a step, whatever the order."""
    losses_alone, state = trained_alone(example("replicas"), 2)
    found = two_ranks.run(trained, tmp_path)
    for rank, (losses, layers_per_pack) in enumerate(found):
        assert layers_per_pack > 0
        alone = torch.tensor([of_step[rank] for of_step in losses_alone], dtype=torch.float32)
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float32), alone)
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), state, rtol=1e-4, atol=1e-5)
