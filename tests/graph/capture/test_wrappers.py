"""Loops with the wrappers of Accelerate and Fabric: written as in their own pages, with eager's
losses, and parameters to the rounding of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler

from cotrain_compile.errors import CaptureError
from tests.support.steps import SEED, Step, cotrain


def plain(step: Step) -> Step:
    return step


PLACED = cotrain(policy="zero-offload", quiet=True)


@pytest.fixture(autouse=True)
def _a_new_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, [torch.randn(3, 4) for _ in range(5)]


def accumulate(compiled: Callable[[Step], Step]) -> list[Tensor]:
    """Five batches, of which two make a step; what is trained after each, and the last loss."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, batches = make_model()
    model, optimizer = accelerator.prepare(model, optimizer)

    @compiled
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = []
    for batch in batches:
        with accelerator.accumulate(model):
            found.append(step(batch))
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return found


def test_accelerate_accumulates_around_the_step() -> None:
    ours, eager = accumulate(PLACED), accumulate(plain)
    torch.testing.assert_close(ours, eager)
    assert torch.equal(ours[3 + 2], ours[1 + 2])  # the third batch only adds gradients up
    # A call that adds to none, one that updates, one that adds to what is there.
    assert counters["stats"]["unique_graphs"] <= 3


def scale(compiled: Callable[[Step], Step], fused: bool) -> list[tuple[float, float, bool]]:
    """Loss, scale and whether the update was skipped, where the second batch has an inf."""
    accelerator = Accelerator(cpu=True)
    # Accelerate refuses float16 on the CPU; the scaler is the same there.
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    accelerator.scaler = GradScaler("cpu", init_scale=2.0**10)
    model, _, batches = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches[1][0] = float("inf")

    @compiled
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).float().clamp(-9, 9).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return [
        (step(x).item(), accelerator.scaler.get_scale(), bool(optimizer.step_was_skipped))
        for x in batches
    ]


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.long), True])
def test_accelerate_scales_a_loss_and_sees_what_is_skipped(fused: bool) -> None:
    ours, eager = scale(PLACED, fused), scale(plain, fused)
    assert [row[1:] for row in ours] == [row[1:] for row in eager]
    assert ours[2][1] == 2.0**9
    assert ours[1][2] is not fused
    torch.testing.assert_close(
        torch.tensor([row[0] for row in ours]),
        torch.tensor([row[0] for row in eager]),
        rtol=1e-3,
        atol=1e-4,
        equal_nan=True,
    )


def test_a_loss_that_fabric_scales_goes_on_without_its_model() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer, (x, *_) = make_model()
    wrapped: Any
    wrapped, optimizer = fabric.setup(model, optimizer)
    fabric._precision.scaler = GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]

    def step_of(called: Callable[[Tensor], Tensor]) -> Step:
        def step(x: Tensor) -> Tensor:
            with fabric.autocast():
                loss = called(x).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return PLACED(step)

    with pytest.raises(CaptureError, match=r"call model.module under fabric.autocast"):
        step_of(wrapped)(x)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    step_of(wrapped.module)(x)
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert 0.01 < (after - before).abs().max() < 0.1
