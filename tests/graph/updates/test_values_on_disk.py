"""Offloaded values, and gradients kept in `.grad`, rest on disk where the host has no room."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.entry.compiled import inspect, synchronize
from cotrain_compile.errors import DiskError, StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.disk.state_files import file_of

pytestmark = pytest.mark.usefixtures("small_pieces")

IN_MEMORY: dict[str, Any] = {"machine": "rtx4090", "plan_cache": False, "quiet": True}
WIDTH, ROWS, LAYERS = 128, 1 << 13, 8
# The values of a layer: what its activation reads, and what the next layer does.
VALUE_BYTES = 4 * WIDTH * ROWS


class Deep:
    """A small model on a large batch: what there is to offload are values."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*[part for layer in layers for part in layer])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        torch._dynamo.reset()
        self.step = torch.compile(self._step, backend="cotrain", options={**IN_MEMORY, **options})

    def _step(self, x: Tensor) -> Tensor:
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    def train(self, steps: int) -> list[Tensor]:
        batches = torch.Generator().manual_seed(1)
        losses = [self.step(torch.randn(ROWS, WIDTH, generator=batches)) for _ in range(steps)]
        synchronize()
        return losses


SCARCE: dict[str, Any] = {
    "policy": "greedy",
    "recompute": "off",
    "split": "off",
    "memory_budget": 7 * VALUE_BYTES,
}


@pytest.mark.parametrize("policy", ["greedy", pytest.param("auto", marks=pytest.mark.long)])
def test_a_step_whose_values_rest_on_disk_is_the_same_step(policy: str, tmp_path: Path) -> None:
    scarce = {**SCARCE, "policy": policy}
    without = Deep(**scarce, host_memory_budget="1GiB")
    losses = without.train(4)
    needed = inspect(without.step).plan.predicted.peak_bytes[Tier.HOST]
    with_disk = Deep(**scarce, host_memory_budget=needed - VALUE_BYTES, disk=tmp_path)
    assert with_disk.train(4) == losses
    compiled = inspect(with_disk.step)
    plan, measured = compiled.plan, compiled.measured
    assert measured is not None
    assert plan.placement.offloaded_to_disk
    assert all(
        measured.peak_bytes[t] <= plan.predicted.peak_bytes[t] <= plan.budgets[t]
        for t in plan.tiers
    )
    for one, other in zip(with_disk.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_drive_says_what_was_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values are written nothing is, and the step may run again; they are read among updates.

    And a drive that is full is found before the first step.
    """
    training = Deep(**SCARCE, host_memory_budget=5 * VALUE_BYTES, disk=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", _raising(errno.ENOSPC))
    with pytest.raises(DiskError, match="no room for a tensor"):
        training.train(1)
    monkeypatch.undo()
    training.train(1)
    before = [p.detach().clone() for p in training.model.parameters()]
    monkeypatch.setattr(os, "pwritev", _raising(errno.EIO))
    with pytest.raises(StepFailed, match=r"offload\..* could not be written: Input/output error"):
        training.train(1)
    monkeypatch.undo()
    assert all(map(torch.equal, training.model.parameters(), before))
    training.train(1)
    monkeypatch.setattr(os, "preadv", _raising(errno.EIO))
    told = r"fetch\..* could not be read: Input/output error.* tensors are one step ahead of"
    with pytest.raises(StepFailed, match=told):
        training.train(1)


def _raising(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


class Adding:
    """Gradients added up over calls, then an update in a call of its own."""

    def __init__(self, add_up: dict[str, Any], update: dict[str, Any]) -> None:
        torch.manual_seed(0)
        widths = (16, *[750] * 8)
        self.model = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch._dynamo.reset()
        on_host = {**IN_MEMORY, "policy": "greedy", "rests_on": "host", "memory_budget": "1GiB"}
        self.add_up = torch.compile(self._add_up, backend="cotrain", options={**on_host, **add_up})
        self.update = torch.compile(self._update, backend="cotrain", options={**on_host, **update})

    def _add_up(self, x: Tensor) -> Tensor:
        loss = self.model(x).pow(2).mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, updates: int) -> None:
        """`updates` updates of two micro-batches, and then gradients that stay."""
        batches = torch.Generator().manual_seed(1)
        for number in range(2 * updates + 2):
            self.add_up(torch.randn(4, 16, generator=batches))
            if number % 2 and number < 2 * updates:
                self.update()
        synchronize()

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    @property
    def tensors(self) -> list[Tensor]:
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self.model.parameters(), *states, *self.gradients]


def test_gradients_are_added_up_on_disk_and_read_there(tmp_path: Path) -> None:
    without = Adding({}, {})
    without.train(2)
    with_disk = Adding(
        {"disk": tmp_path, "host_memory_budget": "20MiB"},
        {"disk": tmp_path, "host_memory_budget": "47.5MiB"},
    )
    with_disk.train(2)
    assert any(file_of(gradient) for gradient in with_disk.gradients)
    homes = inspect(with_disk.update).plan.placement.homes
    assert any(tier is Tier.DISK for name, tier in homes.items() if name.endswith(".grad"))
    for one, other in zip(with_disk.tensors, without.tensors, strict=True):
        assert torch.equal(one, other)
    assert not list(tmp_path.iterdir())
