"""Train: the demo's job as a user would write it, its checkpoints, and the loop over steps.

`training_step` is plain PyTorch; the only line about this package is the `torch.compile` in
`compiled`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile.demo.model import CharacterGPT, Shape
from cotrain_compile.demo.text import batch
from cotrain_compile.errors import FormatError, OptionError

Step = Callable[[Tensor, Tensor], Tensor]

LEARNING_RATE = 3e-4
LARGEST_GRADIENT_NORM = 1.0
# Between the batches of one rank and of the next.
SEEDS_APART = 1_000


@dataclass(frozen=True)
class Job:
    """A model with its optimizer, and the data it trains on: `rows` windows of `text` a step.

    `seed` is that of its batches, which differ from rank to rank.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    text: Tensor
    shape: Shape
    rows: int
    seed: int

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass(frozen=True)
class StepResult:
    """One step: its number from 0, its loss and how long it took."""

    number: int
    loss: float
    seconds: float


def new_job(text: Tensor, *, shape: Shape, rows: int, seed: int) -> Job:
    """A freshly initialised job: the same numbers for the same seed.

    In a process group its model is the group's, and its batches are those of this rank.
    """
    torch.manual_seed(seed)
    model: nn.Module = CharacterGPT(shape)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
        seed += SEEDS_APART * dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return Job(model, optimizer, text, shape, rows, seed)


def training_step(job: Job) -> Step:
    """One whole training step of `job`, in plain PyTorch."""
    model, optimizer = job.model, job.optimizer

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT_NORM)
        optimizer.step()
        return loss

    return step


def compiled(step: Step, options: dict[str, Any]) -> Step:
    """The same step, placed over device and host memory."""
    return torch.compile(step, backend="cotrain", options=options)


def train(job: Job, step: Step, first: int, last: int) -> Iterator[StepResult]:
    """Run steps `first` to `last - 1`, one for each item taken."""
    for number in range(first, last):
        inputs, targets = batch(job.text, number, job.rows, job.shape.context, job.seed)
        started = time.perf_counter()
        loss = step(inputs, targets).item()
        yield StepResult(number, loss, time.perf_counter() - started)


def steps_taken(job: Job) -> set[int]:
    """How many updates each parameter has had, as the optimizer counts: one number, or a fault."""
    counts = {int(state["step"]) for state in job.optimizer.state.values()}
    return counts or {0}


def save_checkpoint(job: Job, path: Path) -> None:
    """Model and optimizer as plain `state_dict`s."""
    torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, path)


def load_checkpoint(job: Job, path: Path) -> None:
    """Continue `job` from `path`. Raises `OptionError` when there is none, `FormatError` when it
    is of another model."""
    if not path.is_file():
        raise OptionError(f"nothing to resume: there is no {path}; run without --resume")
    saved = torch.load(path, weights_only=True)
    try:
        job.model.load_state_dict(saved["model"])
        job.optimizer.load_state_dict(saved["optimizer"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise FormatError(
            f"{path} is not a checkpoint of this demo's model ({error}); run without --resume"
        ) from None
