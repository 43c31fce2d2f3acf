"""Settings of the process: random numbers, autocast, dtypes."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.support.sequences.registry import action
from tests.support.sequences.twin import Training


@action
def reseed(training: Training, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(100))


@action
def draw(training: Training, rng: random.Random) -> Any:
    return torch.rand(3)


@action
def switch_autocast(training: Training, rng: random.Random) -> None:
    training.autocast = not training.autocast


@action
def switch_default_dtype(training: Training, rng: random.Random) -> None:
    is_double = torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32 if is_double else torch.float64)


@action
def set_deterministic(training: Training, rng: random.Random) -> None:
    torch.use_deterministic_algorithms(rng.random() < 0.5)
