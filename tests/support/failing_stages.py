"""Stages that fail on one rank alone, and what all ranks are told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

import torch

import cotrain_compile
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.errors import CotrainError
from cotrain_compile.machine import Tier
from tests.support.pipelines import Run, Trained, loss_of, made, pictures


@dataclass(frozen=True)
class Told:
    """What a rank is told of a short batch and of a budget overrun of rank 1; its losses where the
    batch has NaN; what it trains then; and what it is told where an update of rank 1 has failed.
    """

    short: str
    overrun: str
    judged: list[float]
    trained: Trained
    updated: str


def fails_and_goes_on(rank: int, plan: StagePlan) -> Told:
    """Steps that fail on rank 1, then a training."""
    run = Run("resnet", plan)
    inputs, target = pictures(0)
    count = len(inputs) - rank
    short = told(lambda: run.pipe.step(inputs[:count], target=target[:count]))
    with short_of_memory(run.pipe.stages[0].turns.functions[0], rank):
        overrun = told(lambda: run.pipe.step(inputs, target=target))
    losses: list[torch.Tensor] = []
    run.pipe.eval(torch.full_like(inputs, torch.nan), target=target, losses=losses)
    trained = run.train()
    with short_of_memory(run.update, rank):
        updated = told(run.update)
    if rank == 0:
        updated = told(lambda: run.pipe.step(inputs, target=target))
    return Told(short, overrun, [float(loss) for loss in losses], trained, updated)


def overruns_and_goes_on(rank: int, plan: StagePlan) -> tuple[str, Trained]:
    """What this rank is told where the first turns of rank 1 overrun; what it trains then."""
    run = Run("resnet", plan)
    inputs, target = pictures(0)
    with short_of_memory(run.pipe.stages[0].turns.functions[0], rank):
        overrun = told(lambda: run.pipe.step(inputs, target=target))
    return overrun, run.train()


def short_of_memory(function: Callable[..., object], rank: int) -> AbstractContextManager[object]:
    """Within it rank 1 has no room for what `function` takes."""
    budgets = cotrain_compile.inspect(function)._device.meter.budgets
    return mock.patch.dict(budgets, {Tier.DEVICE: 1000} if rank == 1 else {})


def other_code(rank: int, plan: StagePlan) -> str:
    """What a rank is told where the loss of rank 1 is another one."""
    inputs, target = pictures(0)
    losses = (loss_of, lambda logits, target: 2 * loss_of(logits, target))
    return told(
        lambda: cotrain_compile.pipeline(made("resnet"), plan, losses[rank], (inputs,), target)
    )


def told(run: Callable[[], object]) -> str:
    try:
        run()
    except CotrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
