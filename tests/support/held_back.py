"""Held back: trainings whose steps return long before their updates on the host are done.

A `Training` overlaps its steps, or not; `held_back` stops its updates at a gate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.presets import find
from tests.support.steps import (
    Step,
    all_tensors,
    cotrain,
    cross_entropy,
    make_step,
    vectors,
)

PATIENCE_S = 60.0


@dataclass
class Training:
    """A model, its optimizer, and the step that trains it with every update on the host."""

    model: nn.Module
    optimizer: Optimizer
    step: Step

    @property
    def compiled(self) -> CompiledStep:
        return cotrain_compile.inspect(self.step)

    def tensors(self) -> dict[str, Tensor]:
        """All that training changes, once nobody is at work on it."""
        cotrain_compile.synchronize()
        return all_tensors(self.model, [self.optimizer])


def make_model() -> nn.Module:
    """Two layers with dropout, and three parameters: each costs its update in every trace."""
    layers = nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 4, bias=False)
    return nn.Sequential(*layers).train()


def make_training(folder: Path, *, overlap: bool = True, lr: float | Tensor = 1e-2) -> Training:
    """Two of these are equal, but for whether their steps overlap."""
    machine = find("this-machine")
    # A device whose forward takes long enough for all updates.
    slow = machine.but(device=replace(machine.device, launch_s=1e-3))
    files.save(slow, folder / "machine.json")
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    compile_with = cotrain(
        policy="zero-offload",
        host_kernels="captured",
        overlap_steps=overlap,
        machine=str(folder / "machine.json"),
    )
    return Training(model, optimizer, compile_with(make_step(model, [optimizer], cross_entropy)))


def run_steps(training: Training, count: int, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(count):
        training.step(*vectors())


@contextmanager
def with_kernels(
    compiled: CompiledStep, change: Callable[[str, Callable[..., None]], Callable[..., None]]
) -> Iterator[None]:
    """Within it, updates on the host run what `change` makes of their kernels."""
    device: Any = compiled._device
    kernels = {name: change(name, kernel) for name, kernel in device._kernels.items()}
    with mock.patch.object(device, "_kernels", kernels):
        yield


@contextmanager
def held_back(compiled: CompiledStep) -> Iterator[threading.Event]:
    """Updates on the host wait for the event, which is set at the end if not before."""
    gate = threading.Event()

    def behind_the_gate(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            assert gate.wait(PATIENCE_S)
            kernel(*arguments)

        return run

    with with_kernels(compiled, behind_the_gate):
        try:
            yield gate
        finally:
            gate.set()


def failing(broken: str) -> Callable[[str, Callable[..., None]], Callable[..., None]]:
    """For `with_kernels`: the update called `broken` fails when it has done its work."""

    def change(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            kernel(*arguments)
            if name == broken:
                raise RuntimeError("the host is on fire")

        return run

    return change
