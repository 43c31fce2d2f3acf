"""What a program does in eager between the calls: steps, gradients, an evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F

import cotrain_compile
from cotrain_compile.errors import CotrainError
from tests.support.sequences.registry import action
from tests.support.sequences.twin import Training


@action
def eager_step(training: Training, rng: random.Random) -> Any:
    return training.plain["train"](*training.batch())


@action
def eager_gradients(training: Training, rng: random.Random) -> Any:
    return training.plain["collect"](*training.batch())


@action
def evaluate(training: Training, rng: random.Random) -> Any:
    training.model.eval()
    x, y = training.batch(5)
    with torch.no_grad():
        loss = F.cross_entropy(training.model(x), y)
    training.model.train()
    return loss


@action
def look(training: Training, rng: random.Random) -> Any:
    """What tells of a step changes nothing."""
    kind = rng.choice(["inspect", "report", "synchronize"])
    if kind == "synchronize":
        cotrain_compile.synchronize()
    elif training.steps["train"] is not training.plain["train"]:
        tell: Callable[[Any], Any] = getattr(cotrain_compile, kind)
        with suppress(CotrainError):  # not called since it was written anew
            tell(training.steps["train"])
