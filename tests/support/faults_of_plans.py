"""Trainings by plans of the cluster in which something fails: stages, widths, CPU helpers.

`train_by_plan` trains a few steps and calls `fail` at one `Point`, on every rank; what fails then,
and on which of them, is up to that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import cotrain_compile
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.distribute import burst as bursts
from cotrain_compile.distribute.cpu_helpers import HelpedExchange
from cotrain_compile.pipelining.torch_stages import TurnStage
from cotrain_compile.pipelining.turns import Turns

PLANS = ("pipeline", "swapped", "burst", "helpers")
PLAN_PLACES = ("before a step", "in a turn", "in an exchange", "before an update")
MICRO_BATCHES, ROWS = 2, 12


@dataclass(frozen=True)
class Point:
    """The time `number`, from 0 on, that a rank comes to `place` in a step."""

    place: str
    step: int
    number: int


class Probe:
    """Where a rank is; it calls `fail` at its point."""

    def __init__(self, point: Point, fail: Callable[[], None]) -> None:
        self.point = point
        self._fail = fail
        self._seen = itertools.count()
        self.step = -1

    def at(self, place: str) -> None:
        is_there = (place, self.step) == (self.point.place, self.point.step)
        if is_there and next(self._seen) == self.point.number:
            self._fail()

    def before(self, place: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which comes to `place` when it is called."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.at(place)
            return original(*args, **kwargs)

        return run


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def train_by_plan(name: str, point: Point, steps: int, fail: Callable[[], None]) -> None:
    """So many steps of a small model by the plan `name`, one of `PLANS`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(2 * dist.get_world_size())), nn.Linear(8, 4))
    probe = Probe(point, fail)
    train = {"burst": _burst, "helpers": _helped}.get(name, _staged)
    with _watched(probe):
        train(model, steps, probe, name)


@contextmanager
def _watched(probe: Probe) -> Iterator[None]:
    """Within it turns and exchanges are places."""
    with (
        mock.patch.object(Turns, "_come", probe.before("in a turn", Turns._come)),
        mock.patch.object(
            TurnStage, "_counted", probe.before("in an exchange", TurnStage._counted)
        ),
        mock.patch.object(bursts, "_exchanged", probe.before("in an exchange", bursts._exchanged)),
        mock.patch.object(
            HelpedExchange, "_sum", probe.before("in an exchange", HelpedExchange._sum)
        ),
    ):
        yield


def _staged(model: nn.Sequential, steps: int, probe: Probe, name: str) -> None:
    ranks = dist.get_world_size()
    swapped = name == "swapped"
    count = 2 * ranks if swapped else ranks
    points = tuple(str(number * 2 * ranks // count) for number in range(1, count))
    schedule = "LoopedBFS" if swapped else "1F1B"
    plan = StagePlan(schedule, points, ranks, ROWS // ranks, swapped=swapped, ahead=swapped)
    x, y = _batch(0)
    pipe = cotrain_compile.pipeline(
        model, plan, F.cross_entropy, (x,), y, options={"quiet": True, "policy": "greedy"}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    update = pipe.compiled_update(optimizer)
    for probe.step in range(steps):
        probe.at("before a step")
        x, y = _batch(probe.step)
        pipe.step(x, target=y)
        probe.at("before an update")
        update()


def _burst(model: nn.Sequential, steps: int, probe: Probe, name: str) -> None:
    ranks = dist.get_world_size()
    wide = cotrain_compile.burst(model, {"0": ranks, "2": 1, "3": ranks})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: probe.at("in a turn"))
    for probe.step in range(steps):
        probe.at("before a step")
        optimizer.zero_grad()
        wide.backward(F.cross_entropy, *_batch(probe.step))
        probe.at("before an update")
        optimizer.step()


def _helped(model: nn.Sequential, steps: int, probe: Probe, name: str) -> None:
    with cotrain_compile.cpu_helpers(model, 1) as exchange:
        if exchange.helps:
            probe.step = probe.point.step  # it does nothing but exchange
            exchange.serve()
            return
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for probe.step in range(steps):
            probe.at("before a step")
            optimizer.zero_grad()
            x, y = _batch(probe.step)
            loss = F.cross_entropy(model(x), y)
            probe.at("in a turn")
            loss.backward()
            exchange.average_gradients()
            probe.at("before an update")
            optimizer.step()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, x[:, :4].argmax(1)
