"""Stages that fail on one rank alone, and what all ranks are told."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import cotrain_compile
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.errors import CotrainError
from cotrain_compile.machine import Tier
from cotrain_compile.pipelining.turns import Turns
from tests.support.pipelines import STEPS, Run, Trained, loss_of, made, pictures


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


@dataclass(frozen=True)
class Early:
    """What a rank trains with updates that are just in time, where the first stage's last backward
    waits until the last stage has updated; and what it is told where a turn of rank 0 fails, and
    how far its parameters are from before that step."""

    trained: Trained
    told: str
    moved: float


def updates_just_in_time(rank: int, plan: StagePlan, folder: Path) -> Early:
    run = Run("resnet", plan)
    turns = run.pipe.stages[0].turns
    if rank == 0:
        _wait_in_last_backward(turns, plan.micro_batches, folder)
    else:
        _tell_of_updates(run, folder)
    trained = run.train(just_in_time=True)
    trained = Trained(trained.losses, {k: v.clone() for k, v in trained.state.items()})
    inputs, target = pictures(0)
    (backward,) = turns.functions[-1:]
    with short_of_memory(backward, 1 - rank):  # of rank 0
        said = told(lambda: run.pipe.step(inputs, target=target, update=run.update))
    params = dict(run.model.named_parameters())
    moved = max(float((p.detach() - trained.state[name]).abs().max()) for name, p in params.items())
    return Early(trained, said, moved)


def _wait_in_last_backward(turns: Turns, micro_batches: int, folder: Path) -> None:
    """Let the last backward of each of three steps end when the other rank has updated."""
    run, calls = turns.backward, itertools.count(1)

    def backward(*args: Any) -> torch.Tensor | None:
        step, left = divmod(next(calls), micro_batches)
        if left == 0 and step <= STEPS:
            _wait_for(folder / f"updated {step}")
        return run(*args)

    turns.backward = backward  # type: ignore[method-assign, assignment]


def _tell_of_updates(run: Run, folder: Path) -> None:
    update, calls = run.update, itertools.count(1)

    def updated() -> None:
        update()
        (folder / f"updated {next(calls)}").touch()

    run.update = updated


def _wait_for(path: Path) -> None:
    ends = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < ends, "the other rank has not updated"
        time.sleep(0.01)


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
