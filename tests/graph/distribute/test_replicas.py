"""The whole model on two ranks, within a budget, layers run for all micro-batches: the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.helped_ranks import example
from tests.support.ranks import Ranks

STEPS = 3


def trained(rank: int, folder: Path) -> Any:
    return example("replicas").train(STEPS, "150KiB", "by-layer", folder / "model.pt")


def test_micro_batches_by_layer_train_as_one_process_does(two_ranks: Ranks, tmp_path: Path) -> None:
    """Harmony's data parallelism; gradients are exchanged once a step, whatever the order."""
    code = example("replicas")
    torch.manual_seed(0)
    model = code.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank in range(2):
            x, y = code.batch(number, rank)
            loss = F.cross_entropy(model(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        alone.append(losses)
    found = two_ranks.run(trained, tmp_path)
    for rank, (losses, layers_per_pack) in enumerate(found):
        assert layers_per_pack > 0
        torch.testing.assert_close(losses, [of_step[rank] for of_step in alone])
    torch.testing.assert_close(
        torch.load(tmp_path / "model.pt"), dict(model.state_dict()), rtol=1e-4, atol=1e-5
    )
