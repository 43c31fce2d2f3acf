"""Scaled steps: trainings with a `GradScaler`, some of whose batches hold an inf.

Such batches make gradients that are not finite: eager then skips the update. `train` runs a step of
`MAKERS` over all of them; out comes everything that it leaves, step by step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from tests.support.captured_steps import make_two_layers
from tests.support.closeness import assert_near
from tests.support.steps import OPTIMIZERS, SEED, Batch, Step, all_tensors, check_peak, cotrain

MakeStep = Callable[[nn.Module, Sequence[Optimizer], GradScaler], Step]

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]

# In float64 what differs is torch's compiled Adam: it takes bias corrections in float32.
ROUNDING = 1e-5
# One ulp of a float16 activation or gradient, which a rounding of a parameter can flip.
FP16_ROUNDING = 1e-3

# Which of the batches hold an inf; the scale grows after two good ones.
SKIPPED = (False, False, True, False, True, True, False, False)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def fp16_loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return loss_of(model, x.float(), y)


def make_clipping(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler, loss_of: LossOf = loss_of
) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def make_in_fp16(model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler) -> Step:
    model.float()  # autocast leaves float64 alone
    return make_clipping(model, optimizers, scaler, fp16_loss_of)


def make_accumulating(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler
) -> Step:
    """Two micro-batches; the update unscales; gradients are cleared last."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for half in (slice(None, 4), slice(4, None)):
            loss = loss_of(model, x[half], y[half]) / 2
            scaler.scale(loss).backward()
            total = total + loss.detach()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return total

    return step


def make_one_of_two(model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler) -> Step:
    """Two optimizers, of which only the first meets the inf: the other one still steps."""
    first = torch.optim.Adam(list(model.parameters())[:2], lr=1e-2, foreach=False)
    second = torch.optim.SGD(list(model.parameters())[2:], lr=1e-2, momentum=0.9, foreach=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x.nan_to_num(posinf=1.0), y)
        scaler.scale(loss).backward()
        for param in first.param_groups[0]["params"]:
            param.grad.mul_(x.sum())
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()
        first.zero_grad()
        second.zero_grad()
        return loss

    return step


MAKERS: dict[str, MakeStep] = {
    "clipping": make_clipping,
    "fp16": make_in_fp16,
    "accumulating": make_accumulating,
    "one of two": make_one_of_two,
}


def batches() -> list[Batch]:
    found: list[Batch] = []
    for skipped in SKIPPED:
        x, y = torch.randn(8, 12, dtype=torch.float64), torch.randint(0, 4, (8,))
        if skipped:
            x[0, 0] = math.inf
        found.append((x, y))
    return found


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def train(
    make: MakeStep,
    optimizer: str = "sgd",
    compile_with: Callable[[Step], Step] = lambda step: step,
    after_step: Callable[[Step], None] = lambda step: None,
    enabled: bool = True,
) -> dict[str, Any]:
    """Everything that training leaves, of every step; and the scaler's own state."""
    torch.manual_seed(SEED)
    model = make_two_layers().double()
    optimizers = OPTIMIZERS[optimizer](model)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled)
    step = compile_with(make(model, optimizers, scaler))
    left: dict[str, Any] = {}
    for number, batch in enumerate(batches()):
        left[f"{number} loss"] = step(*batch)
        after_step(step)
        left[f"{number} scaler"] = scaler.state_dict()
        for name, value in all_tensors(model, optimizers).items():
            left[f"{number} {name}"] = value
    left["pending"] = dict(scaler._per_optimizer_states) if enabled else {}
    return left


def assert_close(ours: object, eager: object, rounding: float = ROUNDING) -> None:
    assert_near(ours, eager, rounding)


def assert_as_eager(
    make: MakeStep, optimizer: str = "sgd", enabled: bool = True, **options: Any
) -> None:
    eager = train(make, optimizer, enabled=enabled)
    ours = train(make, optimizer, cotrain(**options), check_peak, enabled=enabled)
    rounding = FP16_ROUNDING if make is make_in_fp16 else ROUNDING
    assert_close(ours, eager, rounding)
    assert graphs() == 1


@functools.cache
def placed(make: MakeStep, optimizer: str, policy: str) -> tuple[dict[str, Any], int, CompiledStep]:
    """What training leaves, the number of graphs that it takes, and what was compiled."""
    steps: list[Step] = []

    def compile_with(step: Step) -> Step:
        steps.append(cotrain(policy=policy)(step))
        return steps[0]

    before = graphs()
    left = train(make, optimizer, compile_with, check_peak)
    return left, graphs() - before, cotrain_compile.inspect(steps[0])
