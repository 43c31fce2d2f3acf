"""Rates that schedulers of torch move: whatever optimizer they are of, a step is compiled once."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lr
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

from cotrain_compile.capture.dynamo import settings
from tests.support.steps import (
    SEED,
    Step,
    all_tensors,
    cotrain,
    cross_entropy,
    make_step,
    vectors,
)

STEPS = 4

SCHEDULES: dict[type, Callable[[Optimizer], Any]] = {
    lr.LambdaLR: lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    lr.MultiplicativeLR: lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.9),
    lr.StepLR: lambda o: lr.StepLR(o, 2),
    lr.MultiStepLR: lambda o: lr.MultiStepLR(o, [2, 4]),
    lr.ConstantLR: lambda o: lr.ConstantLR(o, 0.5, 3),
    lr.LinearLR: lambda o: lr.LinearLR(o, 0.5, total_iters=4),
    lr.ExponentialLR: lambda o: lr.ExponentialLR(o, 0.9),
    lr.SequentialLR: lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o, 0.5, 2), lr.ExponentialLR(o, 0.9)], [3]
    ),
    lr.ChainedScheduler: lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.5, 2), lr.ExponentialLR(o, 0.9)]
    ),
    lr.PolynomialLR: lambda o: lr.PolynomialLR(o, 4),
    lr.CosineAnnealingLR: lambda o: lr.CosineAnnealingLR(o, 5),
    lr.CosineAnnealingWarmRestarts: lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    lr.CyclicLR: lambda o: lr.CyclicLR(
        o, 1e-4, 1e-3, step_size_up=3, cycle_momentum=has_momentum(o)
    ),
    lr.OneCycleLR: lambda o: lr.OneCycleLR(
        o, 1e-2, total_steps=STEPS + 1, cycle_momentum=has_momentum(o)
    ),
    lr.ReduceLROnPlateau: lambda o: lr.ReduceLROnPlateau(o, patience=0),
}


def has_momentum(optimizer: Optimizer) -> bool:
    """What schedules that move it ask."""
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def all_schedules() -> set[type]:
    classes = inspect.getmembers(lr, inspect.isclass)
    return {c for name, c in classes if issubclass(c, lr.LRScheduler) and not name.startswith("_")}


def test_the_table_has_every_schedule_of_torch() -> None:
    assert set(SCHEDULES) == all_schedules() - {lr.LRScheduler}


# By name: the class, and how it is made, each with a rate of its own: a rate that equals one that
# moves would be an input as well.
EVERY: dict[str, Callable[..., Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True, weight_decay=0.01),
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9),
    "rprop": torch.optim.Rprop,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
RATES = {name: 1e-3 + 1e-5 * number for number, name in enumerate(EVERY)}
# It runs its step several times, and the other takes sparse gradients.
REFUSED = {torch.optim.LBFGS, torch.optim.SparseAdam}

# A schedule and an optimizer, three pairs to a step.
PAIRS = list(zip(SCHEDULES, EVERY, strict=True))
TOGETHER = [PAIRS[at : at + 3] for at in range(0, len(PAIRS), 3)]


def test_the_table_has_every_optimizer_of_torch() -> None:
    classes = inspect.getmembers(torch.optim, inspect.isclass)
    found = {getattr(make, "func", make) for make in EVERY.values()}
    assert found == {c for _, c in classes if issubclass(c, Optimizer)} - {Optimizer} - REFUSED


def test_a_schedule_that_somebody_has_looked_into_is_found() -> None:
    model = nn.Linear(2, 2)
    alone, scheduled = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedule = lr.ReduceLROnPlateau(scheduled)
    assert vars(schedule)
    assert settings._is_scheduled(scheduled)
    assert not settings._is_scheduled(alone)


def assert_compiled_once(pairs: Sequence[tuple[type, str]]) -> None:
    """A step in which each layer has an optimizer of its own, whose rate a schedule moves."""

    def trained(compile_with: Callable[[Step], Step]) -> dict[str, Tensor]:
        torch.manual_seed(SEED)
        sizes = [*range(12, 12 - len(pairs), -1), 4]
        layers = [nn.Linear(*size, bias=False) for size in itertools.pairwise(sizes)]
        model = nn.Sequential(*layers).double()
        optimizers = [
            EVERY[name](layer.parameters(), lr=RATES[name])
            for layer, (_, name) in zip(layers, pairs, strict=False)
        ]
        schedules = [
            SCHEDULES[schedule](optimizer)
            for optimizer, (schedule, _) in zip(optimizers, pairs, strict=True)
        ]
        step = compile_with(make_step(model, optimizers, cross_entropy))
        rates = []
        for _ in range(STEPS):
            x, y = vectors()
            step(x.double(), y)
            rates.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
            for each in schedules:
                each.step(*((1.0,) if isinstance(each, lr.ReduceLROnPlateau) else ()))
        assert all(len(set(of_one)) > 1 for of_one in zip(*rates, strict=True))
        return all_tensors(model, optimizers)

    eager = trained(lambda step: step)
    ours = trained(cotrain(policy="zero-offload"))
    # torch's compiled Adam takes its bias corrections in float32.
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=2e-6)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("pairs", TOGETHER, ids=lambda p: "-".join(name for _, name in p))
def test_rates_that_schedules_move_cost_no_compile(pairs: Sequence[tuple[type, str]]) -> None:
    assert_compiled_once(pairs)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda c: c.__name__)
def test_every_optimizer_under_every_schedule_is_compiled_once(
    schedule: type, optimizer: str
) -> None:
    """Two of them move the momentum as well, which for Adam is the first of its betas."""
    assert_compiled_once([(schedule, optimizer)])
