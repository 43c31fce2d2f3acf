"""The examples of the documentation as modules, and what one process makes of those of ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    """The example of that name, which finds its neighbours."""
    with mock.patch.object(sys, "path", [*sys.path, str(EXAMPLES)]):
        return importlib.import_module(name)


def trained_alone(
    code: ModuleType, ranks: int, steps: int = 3
) -> tuple[list[tuple[float, ...]], dict[str, torch.Tensor]]:
    """The example `code` by one process that has the samples of so many ranks, in eager.

    The loss of each rank's samples by step, and the parameters in the end.
    """
    model = code.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for number in range(steps):
        optimizer.zero_grad()
        losses = []
        for rank in range(ranks):
            x, y = code.batch(number, rank)
            loss = F.cross_entropy(model(x), y)
            (loss / ranks).backward()
            losses.append(loss.item())
        optimizer.step()
        found.append(tuple(losses))
    return found, dict(model.state_dict())
