"""Steps whose small tasks go in bundles leave the bits of steps whose tasks go one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.errors import StepFailed
from cotrain_compile.placement.policies import zero_offload
from cotrain_compile.placement.schedule import schedule
from cotrain_compile.plan import HostRegion, carried_out
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.update_bundles import BundleKernel, ListKernel
from tests.graph.exactness.test_exactness import assert_bitwise_equal
from tests.graph.runtime.test_cuda_runtime import Placed
from tests.support.captured_steps import captured, differences, reference
from tests.support.steps import Run, Step, all_tensors, check_peak, cotrain

SETTINGS = {"policy": "zero-offload", "quiet": True}
STEPS = 3


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    match name:
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        case "adamw fused":
            return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        case "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        case _:  # two settings, one of them changed between steps
            halves = [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() < 2], "lr": torch.tensor(0.1)},
            ]
            return torch.optim.AdamW(halves, lr=1e-2)


class Training:
    """A model of many small parameters, its optimizer and step."""

    def __init__(self, optimizer: str, dtype: torch.dtype, clip: float | None) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(3)]
        self.model = nn.Sequential(*layers).to(dtype)
        self.optimizer = optimizer_of(optimizer, self.model)
        self.batches = [torch.randn(8, 4).to(dtype) for _ in range(STEPS)]
        self.clip = clip
        torch._dynamo.reset()
        self.step: Step = cotrain(**SETTINGS)(self._step)

    def _step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss

    def run(self, batches: Sequence[Tensor] | None = None) -> Run:
        losses = [self.step(x).detach() for x in batches or self.batches]
        return self.left(losses)

    def left(self, losses: list[Tensor]) -> Run:
        return Run(losses, all_tensors(self.model, [self.optimizer]))

    @property
    def compiled(self) -> Any:
        return cotrain_compile.inspect(self.step)


def both_ways(play: Callable[[], Run]) -> None:
    """`play` leaves the same bits with bundles and without."""
    found = play()
    with mock.patch.object(schedule, "REACHES", ()):
        assert_bitwise_equal(play(), found)


def bundled_updates(training: Training) -> Sequence[HostRegion]:
    """The largest bundle of updates in the plan, empty where there is none."""
    groups = [g for g in carried_out(training.compiled.plan.tasks) if len(g) > 1]
    updates = [[task for task in g if isinstance(task, HostRegion)] for g in groups]
    return max(updates, key=len, default=[])


def assert_goes_in_bundles(training: Training) -> None:
    assert bool(bundled_updates(training)) == bool(schedule.REACHES)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("optimizer", "dtype", "clip"),
    [
        pytest.param("adamw", torch.float32, 1e-3, marks=LONG),
        pytest.param("sgd", torch.float32, None, marks=LONG),
        pytest.param("two groups", torch.float32, 1e-3, marks=LONG),
        ("adamw fused", torch.bfloat16, 1e-3),
        pytest.param("adamw", torch.float32, None, marks=LONG),
        pytest.param("sgd", torch.float32, 1e-3, marks=LONG),
        pytest.param("two groups", torch.float32, None, marks=LONG),
        pytest.param("adamw fused", torch.bfloat16, None, marks=LONG),
    ],
)
def test_a_step_in_bundles_has_the_bits_of_one_by_one(
    optimizer: str, dtype: torch.dtype, clip: float | None
) -> None:
    def play() -> Run:
        training = Training(optimizer, dtype, clip)
        first = training.run()
        assert_goes_in_bundles(training)
        check_peak(training.step)
        for group in training.optimizer.param_groups:  # a number of the steps to come
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.5)
        second = training.run()
        return Run([*first.losses, *second.losses], second.tensors)

    both_ways(play)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [pytest.param("adamw", torch.float32, marks=LONG), ("adamw fused", torch.bfloat16)],
)
def test_members_that_are_alike_go_through_one_loop(optimizer: str, dtype: torch.dtype) -> None:
    training = Training(optimizer, dtype, 1e-3)
    training.run()
    kernels = training.compiled._device._kernels.values()
    lists = [
        part
        for kernel in kernels
        if isinstance(kernel, BundleKernel)
        for _, part in kernel.parts
        if isinstance(part, ListKernel)
    ]
    assert sum(len(part.kernels) for part in lists) == len(list(training.model.parameters()))


def test_a_step_goes_on_from_what_was_saved() -> None:
    def play() -> Run:
        training = Training("adamw", torch.float32, 1e-3)
        training.run()
        saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        training.run()
        training.model.load_state_dict(saved[0])
        training.optimizer.load_state_dict(saved[1])
        assert_goes_in_bundles(training)
        return training.run()

    both_ways(play)


def test_an_exception_in_the_step_changes_nothing() -> None:
    def play() -> Run:
        training = Training("adamw", torch.float32, 1e-3)
        training.run()
        before = training.left([torch.zeros(())])
        device: EmulatedDevice = training.compiled._device
        failing = mock.Mock(side_effect=OSError("the link is down"))
        with mock.patch.object(device, "_submit", failing), pytest.raises(OSError, match="link"):
            training.step(training.batches[0])
        assert_bitwise_equal(training.left([torch.zeros(())]), before)
        return training.run()

    both_ways(play)


def test_a_bundle_that_fails_may_have_half_written_all_its_members() -> None:
    training = Training("adamw", torch.float32, 1e-3)
    training.run()
    device = training.compiled._device
    states = 4 * len(bundled_updates(training))  # weights rest beside their states
    name = next(n for n, k in device._kernels.items() if isinstance(k, BundleKernel))
    fails = mock.Mock(side_effect=RuntimeError("the worker is ill"))
    with (
        mock.patch.object(device, "_kernels", {**device._kernels, name: fails}),
        pytest.raises(StepFailed, match="the worker is ill") as failure,
    ):
        training.step(training.batches[0])
    assert f"{states} tensors may be half written" in str(failure.value)


@pytest.mark.parametrize("seed", range(2))
def test_bundles_are_exact_on_streams(seed: int) -> None:
    step = captured("clipped")
    problem = step.problem()
    with mock.patch("cotrain_compile.placement.schedule.bundles.FEWEST", 2):
        plan = schedule.schedule(problem, zero_offload(problem.dataflow))
    assert any(task.bundle for task in plan.tasks)
    placed = Placed("clipped", plan, seed)
    assert not differences(step.train(placed.step), reference("clipped"))
    assert not placed.card.faults
