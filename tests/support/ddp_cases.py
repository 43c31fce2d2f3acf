"""Steps of two ranks: eager `DistributedDataParallel`, and the same step compiled.

What a rank finds is what its test compares; the functions here run in processes of their own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import OutOfDeviceMemory
from cotrain_compile.graph.collectives import is_collective
from cotrain_compile.machine import Tier
from tests.support.closeness import assert_near

STEPS = 4
# Compiled AdamW takes bias corrections in float32.
ROUNDING = {"sgd": 1e-6, "adamw": 1e-4}
# Of what the step takes with everything on the device.
SHARE = 0.6


class Net(nn.Module):
    """With running statistics, and a block that makes its values again where `again`."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.first = nn.Linear(8, 32, bias=False)  # in front of a norm a bias has no gradient
        self.norm = nn.BatchNorm1d(32)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        made = checkpoint(self.block, h, use_reentrant=False) if self.again else self.block(h)
        found: Tensor = self.last(h + made)
        return found


@dataclass(frozen=True)
class Case:
    """`memory` is "resident", "budget" or "again" (a budget, values made again)."""

    optimizer: str = "adamw"
    way: str = "plain"
    memory: str = "resident"


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def make_step(case: Case, model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The training step, as its user writes it for one card or several."""
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if case.way == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    def accumulating(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        quietly = model.no_sync() if case.way == "no_sync" else contextlib.nullcontext()
        with quietly:
            F.cross_entropy(model(x[:4]), y[:4]).backward()
        loss = F.cross_entropy(model(x[4:]), y[4:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    def accumulating_scaled(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        for part, wanted in ((x[:4], y[:4]), (x[4:], y[4:])):
            loss = F.cross_entropy(model(part), wanted)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def scaled(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    ways = {"no_sync": accumulating, "accumulation": accumulating, "scaler": scaled}
    ways["scaled accumulation"] = accumulating_scaled
    return ways.get(case.way, plain)


def batches(case: Case, rank: int) -> list[tuple[Tensor, Tensor]]:
    """What `rank` trains on; with a scaler, gradients of rank 1 alone overflow in one step."""
    generator = torch.Generator().manual_seed(100 + rank)
    found = [
        (torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(STEPS)
    ]
    if case.way.startswith("scale") and rank == 1:
        found[1][0][0, 0] = float("inf")
    return found


@dataclass
class Ran:
    """What a training has returned and left, and of a compiled one its `CompiledStep`."""

    losses: list[Tensor]
    tensors: dict[str, Tensor]
    compiled: Any = None


def train(case: Case, rank: int, options: dict[str, Any] | None = None) -> Ran:
    """Train `case` in eager, or compiled with `options`."""
    torch._dynamo.reset()
    torch.manual_seed(7 + rank)  # the constructor of DDP broadcasts those of rank 0
    model = DistributedDataParallel(Net(again=case.memory == "again"))
    optimizer = _optimizer(case, model)
    step = make_step(case, model, optimizer)
    if options is not None:
        asked: dict[str, Any] = {"quiet": True, "work_limit": 1.0, **options}
        step = torch.compile(step, backend="cotrain", options=asked)
    losses = [step(*batch) for batch in batches(case, rank)]
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return Ran(losses, found, cotrain_compile.inspect(step) if options is not None else None)


def compare(rank: int, case: Case) -> dict[str, Any]:
    """Eager beside compiled: raises where they differ by more than rounding, or memory is passed.

    Under a budget the same plan with the captured ops on the host is that of the resident step, bit
    by bit. Returns what the step exchanges.
    """
    eager, resident = train(case, rank), train(case, rank, {"policy": "resident"})
    _assert_close(resident, eager, case)
    seen = _exchanges(resident.compiled)
    if case.memory != "resident":
        budget = int(SHARE * resident.compiled.plan.predicted.peak_bytes[Tier.DEVICE])
        placing = {"memory_budget": budget, "policy": "greedy"}
        asked = {**placing, "host_kernels": "captured", "verify": 1}
        placed = train(case, rank, asked)
        assert placed.compiled.plan.host_updates, "nothing is updated on the host"
        assert placed.compiled.measured.peak_bytes[Tier.DEVICE] <= budget
        for name, value in resident.tensors.items():
            assert torch.equal(placed.tensors[name], value), f"{case}: {name} differs by its plan"
        assert _exchanges(placed.compiled) == seen
    if case.memory == "budget":
        _assert_close(train(case, rank, placing), eager, case)
    return seen


def _exchanges(compiled: Any) -> dict[str, int]:
    """The bytes that a step exchanges by each kind of collective."""
    found: Counter[str] = Counter()
    for node in compiled.graph.nodes:
        if is_collective(node):
            found[node.target._opname] += node.meta["val"].nbytes
    return dict(found)


def _assert_close(found: Ran, expected: Ran, case: Case) -> None:
    for name, value in expected.tensors.items():
        assert_near(
            {f"{case}: {name}": found.tensors[name]},
            {f"{case}: {name}": value},
            ROUNDING[case.optimizer],
        )


def with_different_budgets(rank: int) -> tuple[Any, Any]:
    """Budgets and tasks of each rank, where the second one may take less."""
    peak = train(Case("sgd"), rank, {"policy": "resident"}).compiled.plan.predicted.peak_bytes
    share = (1.0, SHARE)[rank]
    asked = {"memory_budget": int(share * peak[Tier.DEVICE]), "policy": "greedy"}
    plan = train(Case("sgd"), rank, asked).compiled.plan
    return plan.budgets, plan.tasks


def with_one_rank_out_of_memory(rank: int) -> tuple[int, bool, Any]:
    """What a rank planned for and whether it moves anything; the second one had too little."""
    dry_run, calls = CompiledStep.dry_run, itertools.count()

    def dry_run_once(self: CompiledStep, inputs: Any, *, again: bool = False) -> None:
        dry_run(self, inputs, again=again)
        if rank == 1 and next(calls) == 0:
            raise OutOfDeviceMemory("for once there is too little", tier=Tier.DEVICE)

    told = pytest.warns(UserWarning, match="it is planned again")
    with mock.patch.object(CompiledStep, "dry_run", dry_run_once), told:
        plan = train(Case("sgd"), rank, {"policy": "greedy"}).compiled.plan
    return plan.predicted.peak_bytes[Tier.DEVICE], bool(plan.tasks), plan.placement
