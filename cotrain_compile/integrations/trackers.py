"""Trackers: the scalars of a compiled step in TensorBoard and W&B.

Neither is imported: what is written to is the user's own writer or run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cotrain_compile.entry.compiled import scalars

PREFIX = "cotrain/"


class SummaryWriter(Protocol):
    """What of `torch.utils.tensorboard.SummaryWriter` is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number."""


class TrackerRun(Protocol):
    """What of a run of W&B, `wandb.init()`, is used."""

    def log(self, data: dict[str, Any], step: int) -> Any:
        """Write numbers by name."""


def to_tensorboard(
    writer: SummaryWriter, step: Callable[..., Any], number: int, tokens: float | None = None
) -> None:
    """Write the `scalars` of `step`, after its run `number`, as `cotrain/...`."""
    for name, value in scalars(step, tokens, PREFIX).items():
        writer.add_scalar(name, value, number)


def to_wandb(
    run: TrackerRun, step: Callable[..., Any], number: int, tokens: float | None = None
) -> None:
    """The same to a run of W&B."""
    run.log(scalars(step, tokens, PREFIX), step=number)
