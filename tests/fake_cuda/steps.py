"""Steps that people train and nobody named before: what they share, and all of them by name.

Each is built as for a card, small, and in a form that is met in the wild. `STEPS` has for each name
what builds the step and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Job = tuple[Callable[..., Any], tuple[Any, ...]]

CARD = "cuda"
STEPS: dict[str, Callable[[], Job]] = {}


def named(name: str) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Have what is decorated among the steps, by that name."""

    def add(build: Callable[[], Job]) -> Callable[[], Job]:
        assert name not in STEPS, f"two steps are called {name}"
        STEPS[name] = build
        return build

    return add


def fit(
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    batch: Sequence[Tensor],
    *,
    low: torch.dtype | None = torch.bfloat16,
    after: Callable[[], object] | None = None,
) -> Job:
    """AdamW on what requires gradients, clipped, in autocast of `low`; `after` the update."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(CARD, dtype=low) if low else nullcontext():
            loss = loss_of(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if after:
            after()
        return loss.detach()

    return step, tuple(batch)
