"""Captured steps: a training captured once, with its tensors, to be run with many plans.

A `Training` by name in; out come the `Captured` step and what the captured graph itself leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Machine
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.support.micro_batch_steps import MICRO_BATCH_CASES, make_micro_batch_step
from tests.support.steps import (
    CASES,
    OPTIMIZERS,
    SEED,
    Batch,
    Case,
    MakeOptimizers,
    Step,
    compiling_with,
    cotrain,
    make_step,
)

STEPS = 3


# The steps.


def make_plain_mlp() -> nn.Module:
    """Without LayerNorm, whose statistics are wider on the CPU than a trace under autocast says."""
    return nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 4)
    )


def make_lean_mlp() -> nn.Module:
    """As deep, with fewer parameters, as each costs an update in every trace."""
    hidden = nn.Linear(12, 24, bias=False), nn.GELU(), nn.Linear(24, 24, bias=False), nn.GELU()
    return nn.Sequential(*hidden, nn.Linear(24, 4))


def make_two_layers() -> nn.Module:
    """For what goes by the update of each parameter, a matrix or a bias, and not by the model."""
    return nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 4, bias=False))


class Checkpointed(nn.Sequential):
    """Layers whose values are made again for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def make_checkpointed_mlp() -> nn.Module:
    """With GroupNorm, which has three results: made again, two of them are taken late."""
    block = Checkpointed(nn.GroupNorm(2, 24), nn.GELU(), nn.Linear(24, 24), nn.Softmax(-1))
    return nn.Sequential(nn.Linear(12, 24), block, nn.Linear(24, 4))


def make_checkpointed_linears() -> nn.Module:
    block = Checkpointed(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU())
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), block, nn.Linear(24, 4))


def autocast_cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return CASES["mlp"].loss_of(model, x, y)


def make_unclipped_step(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_of: Callable[..., Tensor]
) -> Step:
    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def make_accumulating_step(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_of: Callable[..., Tensor]
) -> Step:
    """Two micro-batches, one update."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for half in (slice(None, 4), slice(4, None)):
            loss = loss_of(model, x[half], y[half]) / 2
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total

    return step


@dataclass(frozen=True)
class Training:
    case: Case
    make_optimizers: MakeOptimizers
    make: Callable[..., Step] = make_step


AUTOCAST = Case(make_plain_mlp, CASES["mlp"].make_batch, autocast_cross_entropy)
CHECKPOINTED = Case(make_checkpointed_mlp, CASES["mlp"].make_batch, CASES["mlp"].loss_of)
TRAININGS = {
    "clipped": Training(CASES["mlp"], OPTIMIZERS["adamw"]),
    "unclipped": Training(CASES["mlp"], OPTIMIZERS["sgd"], make_unclipped_step),
    "autocast": Training(AUTOCAST, OPTIMIZERS["adamw"]),
    "autocast-unclipped": Training(AUTOCAST, OPTIMIZERS["adam"], make_unclipped_step),
    "accumulating": Training(CASES["mlp"], OPTIMIZERS["adamw-groups"], make_accumulating_step),
    "checkpointed": Training(CHECKPOINTED, OPTIMIZERS["adam"], make_accumulating_step),
    "frozen": Training(CASES["frozen"], OPTIMIZERS["rmsprop"]),
    "tied": Training(CASES["tied"], OPTIMIZERS["adafactor"]),
    "conv": Training(CASES["conv"], OPTIMIZERS["nadam"]),
    "gpt2": Training(CASES["gpt2"], OPTIMIZERS["sgd"]),
    "llama": Training(CASES["llama"], OPTIMIZERS["adamw"]),
    "muon": Training(CASES["mlp"], OPTIMIZERS["muon"]),
    "t5": Training(CASES["t5"], OPTIMIZERS["adagrad"]),
}


def make_keeping_step(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_of: Callable[..., Tensor]
) -> Step:
    """An update whose gradients stay and are added to in the next step."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return step


# For what is about kept gradients alone.
KEEPING = {"keeping": Training(CASES["mlp"], OPTIMIZERS["adamw"], make_keeping_step)}
# Autocast casts weights for each of two micro-batches, those of a checkpoint twice.
RECASTING = {
    "recasting": Training(
        Case(make_checkpointed_linears, CASES["mlp"].make_batch, autocast_cross_entropy),
        OPTIMIZERS["adamw"],
        make_accumulating_step,
    )
}
# Transformers whose micro-batches may run layer by layer, but for one with dropout.
MICRO_BATCHED = {
    name: Training(case.case, OPTIMIZERS[case.optimizer], partial(make_micro_batch_step, case))
    for name, case in MICRO_BATCH_CASES.items()
}


# Running a captured step.


@dataclass(frozen=True)
class Captured:
    """A step graph, the tensors it starts with, and a batch for each step."""

    step: StepGraph
    inputs: tuple[Any, ...]
    batches: tuple[Batch, ...]

    @functools.cached_property
    def dataflow(self) -> Dataflow:
        return extract(self.step)

    def problem(self, machine: Machine | None = None) -> Problem:
        machine = machine or find("this-machine")
        return formulate(self.dataflow, machine, Options().budgets(machine))

    def train(self, run: Callable[[list[Any]], Any]) -> list[Any]:
        """Run the steps with `run`; what they return, and every input as they leave it."""
        torch.manual_seed(SEED)
        inputs = [v.clone() if isinstance(v, Tensor) else v for v in self.inputs]
        batch_at = [i for i, item in enumerate(self.step.inputs) if item.role is Role.BATCH]
        results: list[Any] = []
        for batch in self.batches:
            for position, value in zip(batch_at, batch, strict=True):
                inputs[position] = value
            with torch.no_grad():
                results += run(list(inputs))
        return [*results, *inputs]


def captured(name: str) -> Captured:
    return captured_training((TRAININGS | KEEPING | RECASTING | MICRO_BATCHED)[name])


@functools.cache
def captured_training(training: Training) -> Captured:
    seen: list[Any] = []

    def note(step: StepGraph, dataflow: Dataflow, options: Options) -> Callable[[list[Any]], Any]:
        def run(inputs: list[Any]) -> Any:
            seen.append((step, [v.clone() if isinstance(v, Tensor) else v for v in inputs]))
            with torch.no_grad():
                return step.module(*inputs)

        return run

    torch.manual_seed(SEED)
    model = training.case.make_model().train()
    batches = tuple(training.case.make_batch() for _ in range(STEPS))
    step = training.make(model, training.make_optimizers(model), training.case.loss_of)
    torch._dynamo.reset()
    with compiling_with(note):
        cotrain()(step)(*batches[0])
    graph, inputs = seen[0]
    return Captured(graph, tuple(inputs), batches)


def reference(name: str) -> list[Any]:
    """What the captured graph leaves when it runs as it is."""
    return _reference(name, torch.get_num_threads())


@functools.cache
def _reference(name: str, threads: int) -> list[Any]:
    """On so many threads: kernels split their sums among them, which shows in the last bits."""
    assert torch.get_num_threads() == threads
    step = captured(name)
    return step.train(lambda inputs: step.step.module(*inputs))


def place(name: str, plan: Plan, machine: Machine | None = None, **settings: Any) -> CompiledStep:
    return place_step(captured(name), plan, machine, **settings)


def place_step(
    step: Captured, plan: Plan, machine: Machine | None = None, **settings: Any
) -> CompiledStep:
    problem = step.problem(machine)
    placed = run_passes(step.step, plan)
    kernels = host_kernels(placed, "captured")
    device = EmulatedDevice(problem.machine, plan.budgets, kernels, **settings)
    return CompiledStep(problem, plan, placed, device)


def differences(found: list[Any], expected: list[Any]) -> list[int]:
    """Where two results of `Captured.train` differ in any bit."""
    assert len(found) == len(expected)
    return [
        position
        for position, (a, b) in enumerate(zip(found, expected, strict=True))
        if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b)
    ]
