"""Workspace: what kernels take inside is known to the second plan, at the op that takes it.

But for the long tests, Inductor is replaced by an interpreter of the segments' graphs: it holds the
inputs of a segment to its end, as a fused kernel does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.backends.inductor import lower as lowering
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.replay import replay
from tests.graph.backends.test_segments_of_steps import Interpreted
from tests.support.steps import Step, cotrain, make_step
from tests.support.work import LITTLE_WORK

STEPS = 2


class BasicBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(hidden)))


class ResNet(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(BasicBlock(channels) for _ in range(2)))
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(self.stem(x))
        predicted: Tensor = self.head(hidden.mean((2, 3)))
        return predicted


class UNetBlock(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.norm, self.convolution = (
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        shown: Tensor = self.convolution(F.silu(self.norm(x)))
        return shown


class UNet(nn.Module):
    """What goes down comes up beside what was below it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle = UNetBlock(width, width), UNetBlock(width, width)
        self.up = UNetBlock(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.down(self.stem(x))
        below = F.interpolate(self.middle(F.avg_pool2d(beside, 2)), scale_factor=2.0)
        shown: Tensor = self.out(self.up(torch.cat([below, beside], 1)))
        return shown


NETS = {"resnet": ResNet, "unet": UNet}


def step_of(net: str, dtype: torch.dtype) -> Step:
    torch.manual_seed(0)
    model = NETS[net]().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return make_step(model, [optimizer], lambda model, x: model(x).square().mean())


@dataclass(frozen=True)
class Trained:
    """What ran, its losses, and how often it was planned again."""

    compiled: CompiledStep
    losses: list[Tensor]
    planned_again: int

    @property
    def dry_run_bytes(self) -> int:
        assert self.compiled.dry_run_device_bytes is not None
        return self.compiled.dry_run_device_bytes


def trained(net: str, dtype: torch.dtype = torch.float32, **options: Any) -> Trained:
    torch._dynamo.reset()
    step = cotrain(lowering="inductor", work_limit=LITTLE_WORK, **options)(step_of(net, dtype))
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = [step(torch.randn(8, 3, 16, 16, dtype=dtype)).detach() for _ in range(STEPS)]
    again = sum("planned again" in str(warning.message) for warning in told)
    return Trained(cotrain_compile.inspect(step), losses, again)


@contextmanager
def interpreted() -> Iterator[None]:
    with mock.patch.object(lowering, "compile_graph", Interpreted):
        yield


@pytest.fixture(scope="module")
def resident_unet() -> Trained:
    with interpreted():
        return trained("unet", policy="resident")


def check_second_plan(
    net: str,
    resident: Trained,
    most_again: int = 1,
    share: float = 0.65,
    with_workspace: bool = True,
) -> None:
    """Without: of one long segment a convolution may have taken all, and that fits nowhere."""
    budget = int(share * resident.dry_run_bytes)
    placed = trained(net, memory_budget=budget)
    assert placed.planned_again <= most_again
    assert placed.compiled.measured is not None
    assert placed.compiled.measured.peak_bytes[Tier.DEVICE] <= placed.dry_run_bytes <= budget
    torch.testing.assert_close(placed.losses, resident.losses, rtol=1e-4, atol=1e-5)
    if placed.planned_again and with_workspace:
        buffers = placed.compiled.problem.dataflow.buffers
        assert [buffer for buffer in buffers if buffer.role is Role.WORKSPACE]
        assert any("workspace of up to" in note for note in placed.compiled.plan.notes)


@pytest.mark.long
def test_the_second_plan_of_a_unet_holds(resident_unet: Trained) -> None:
    with interpreted():
        check_second_plan("unet", resident_unet, with_workspace=False)


@pytest.mark.long
def test_some_later_plan_holds_where_the_second_is_cut_elsewhere(resident_unet: Trained) -> None:
    """Values leave by what ops need one by one, to the last byte: code that fuses them has none."""
    budget = int(0.62 * resident_unet.dry_run_bytes)
    with interpreted():
        placed = trained("unet", memory_budget=budget)
    assert placed.compiled.measured is not None
    assert placed.compiled.measured.peak_bytes[Tier.DEVICE] <= placed.dry_run_bytes <= budget
    torch.testing.assert_close(placed.losses, resident_unet.losses, rtol=1e-4, atol=1e-5)


@pytest.mark.long  # as of a UNet, in every run
def test_the_second_plan_of_a_resnet_holds() -> None:
    with interpreted():
        check_second_plan("resnet", trained("resnet", policy="resident"))


@pytest.mark.long
def test_convolutions_in_float64_have_a_plan_that_holds() -> None:
    """Each unfolds its input: two thirds of the budget, which no op beside it could spare too."""
    with interpreted():
        resident = trained("resnet", torch.float64, policy="resident")
        budget = int(0.62 * resident.dry_run_bytes)
        placed = trained("resnet", torch.float64, memory_budget=budget)
    assert placed.compiled.measured is not None
    assert placed.compiled.measured.peak_bytes[Tier.DEVICE] <= placed.dry_run_bytes <= budget
    torch.testing.assert_close(placed.losses, resident.losses)


@pytest.mark.long
@pytest.mark.parametrize("net", NETS)
def test_the_second_plan_of_compiled_segments_holds(net: str) -> None:
    """Or the third, where the second is cut elsewhere: what is fused there takes other memory."""
    check_second_plan(net, trained(net, policy="resident"), most_again=2)


def test_what_a_segment_takes_beyond_the_plan_is_known_for_each_of_its_ops(
    resident_unet: Trained,
) -> None:
    """With it as workspace, the same plan has the peak that was measured."""
    compiled = resident_unet.compiled
    beyond = compiled.beyond_plan()
    assert beyond
    dataflow = compiled.problem.dataflow.with_workspace(beyond)
    assert dataflow.fingerprint == compiled.problem.dataflow.fingerprint
    planned = replay(dataflow, compiled.plan)[Tier.DEVICE].nbytes
    assert planned == resident_unet.dry_run_bytes
    assert planned > compiled.predicted.peak_bytes[Tier.DEVICE]


def test_a_profiler_over_the_first_step_hides_nothing(resident_unet: Trained) -> None:
    with interpreted(), torch.profiler.profile():
        profiled = trained("unet", policy="resident")
    assert profiled.dry_run_bytes == resident_unet.dry_run_bytes
    assert profiled.compiled.measured is not None
    measured = profiled.compiled.measured.peak_bytes[Tier.DEVICE]
    assert measured == resident_unet.dry_run_bytes


def test_an_op_that_runs_on_its_own_has_a_workspace_too() -> None:
    """A convolution in float64 unfolds its input, inside a kernel."""
    model = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(model, [optimizer], lambda model, x: model(x).square().mean())
    run = cotrain(policy="resident", lowering="inductor", eager_segments=["*"])(step)
    peaks = []
    for _ in range(2):
        run(torch.randn(4, 2, 8, dtype=torch.float64))
        compiled = cotrain_compile.inspect(run)
        assert compiled.measured is not None
        peaks.append(compiled.measured.peak_bytes[Tier.DEVICE])
    assert peaks == [compiled.dry_run_device_bytes] * 2
    assert peaks[0] > compiled.predicted.peak_bytes[Tier.DEVICE]
