"""Hyper-parameters may change between steps: at once in effect, most of them without a compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lr
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.capture.aten import scalars
from cotrain_compile.entry import choose_plan
from cotrain_compile.graph import StepGraph
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.host import fused_kernel
from cotrain_compile.runtime.host.captured_kernels import CapturedKernel
from cotrain_compile.runtime.host.fused_kernel import FusedKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.support.captured_steps import make_two_layers
from tests.support.steps import (
    OPTIMIZERS,
    SEED,
    Step,
    all_tensors,
    compiling_with,
    cotrain,
    cross_entropy,
    make_step,
    one,
    vectors,
)

STEPS = 7


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def train(
    make_optimizers: Callable[[nn.Module], list[Optimizer]],
    make_schedule: Callable[[Optimizer], Any],
    compile_with: Callable[[Step], Step] = lambda step: step,
    steps: int = STEPS,
) -> dict[str, Tensor]:
    """Train in float64; every schedule is stepped after every step."""
    torch.manual_seed(SEED)
    model = make_two_layers().double()
    optimizers = make_optimizers(model)
    schedules = [make_schedule(optimizer) for optimizer in optimizers]
    step = compile_with(make_step(model, optimizers, cross_entropy))
    for _ in range(steps):
        x, y = vectors()
        step(x.double(), y)
        for schedule in schedules:
            schedule.step()
    return all_tensors(model, optimizers)


def assert_compiles(
    make_optimizers: Callable[[nn.Module], list[Optimizer]],
    make_schedule: Callable[[Optimizer], Any],
    compiles: int,
    policy: str = "resident",
    steps: int = STEPS,
) -> None:
    eager = train(make_optimizers, make_schedule, steps=steps)
    ours = train(make_optimizers, make_schedule, cotrain(policy=policy), steps)
    # torch's compiled Adam takes its bias corrections in float32.
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=2e-6)
    assert graphs() == compiles


class FromTheFirstStep:
    """Sets the rate before each step, as loops without a scheduler do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.step()

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-4 * self.steps


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(o, marks=() if o == "adafactor" else pytest.mark.long) for o in OPTIMIZERS],
)
def test_a_rate_set_by_hand_before_each_step_costs_no_compile(optimizer: str) -> None:
    assert_compiles(OPTIMIZERS[optimizer], FromTheFirstStep, 1, steps=4)


class ByHand:
    """Changes the hyper-parameters of an optimizer itself, all at once, from the second step on."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self.optimizer, self.names, self.steps = optimizer, names, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps >= 2:
            for group in self.optimizer.param_groups:
                for name in self.names:
                    group[name] = scaled(group[name])


def test_another_rate_goes_on_with_the_plan_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(problem: Problem, *given: Any, **named: Any) -> Plan:
        searched.append(len(problem.dataflow.ops))
        return solve(problem, *given, **named)

    monkeypatch.setattr(choose_plan, "solve", counted)
    once_more = functools.partial(ByHand, names=["lr"])
    assert_compiles(OPTIMIZERS["adamw"], once_more, 2, policy="greedy")
    assert len(searched) == 1


class OneByOne(ByHand):
    """Each setting first changes a step after the one before it."""

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            for name in self.names[: self.steps]:
                group[name] = scaled(group[name])


def scaled(value: Any) -> Any:
    return tuple(map(scaled, value)) if isinstance(value, tuple) else value * 0.99


BY_HAND: dict[str, tuple[str, ...]] = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "adamw-groups": ("lr", "betas", "eps"),
    "adam": ("lr", "betas", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay"),
    "rmsprop": ("lr", "alpha", "momentum", "eps"),
    "adagrad": ("lr", "eps"),
    "nadam": ("lr", "betas", "momentum_decay"),
    "adafactor": ("lr", "beta2_decay"),
    "muon": ("lr",),
}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_changes_by_hand_cost_one_compile(optimizer: str) -> None:
    assert_compiles(OPTIMIZERS[optimizer], lambda o: ByHand(o, BY_HAND[optimizer]), 2)


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.long), "sgd"])
def test_changes_at_different_times_cost_two_compiles(optimizer: str) -> None:
    """Then all settings are inputs: the third and the fourth to change cost nothing."""
    change = functools.partial(OneByOne, names=BY_HAND[optimizer])
    assert_compiles(OPTIMIZERS[optimizer], change, 3, "zero-offload")


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (one(torch.optim.Rprop, lr=1e-3), ("etas", "step_sizes")),
        pytest.param(OPTIMIZERS["muon"], ("ns_coefficients",), marks=pytest.mark.long),
    ],
)
def test_settings_that_torch_bakes_into_its_ops_compile_at_each_change(
    make: Callable[[nn.Module], list[Optimizer]], settings: Sequence[str]
) -> None:
    def change(optimizer: Optimizer) -> ByHand:
        return ByHand(optimizer, [name for name in settings if name in optimizer.defaults])

    assert_compiles(make, change, 3, steps=4)


def kernels_with_changed_settings(optimizer: str) -> set[type]:
    """What runs the host updates after every setting has changed, which costs one compile."""
    steps: list[Step] = []

    def compile_with(step: Step) -> Step:
        steps.append(cotrain(policy="zero-offload")(step))
        return steps[0]

    made = OPTIMIZERS[optimizer], lambda o: ByHand(o, BY_HAND[optimizer])
    torch.testing.assert_close(train(*made, compile_with), train(*made), rtol=1e-5, atol=2e-6)
    assert graphs() == 2
    placed = cotrain_compile.inspect(steps[0]).graph
    return {type(kernel) for kernel in host_kernels(placed, "fused").values()}


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw-groups",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("adam", "sgd", "adagrad")),
    ],
)
def test_fused_loops_take_settings_that_are_inputs(optimizer: str) -> None:
    assert kernels_with_changed_settings(optimizer) == {FusedKernel}


def test_a_fused_loop_with_old_settings_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernel, "with_settings", lambda settings, live: settings)
    assert kernels_with_changed_settings("sgd") == {CapturedKernel}


def test_a_rate_in_a_tensor_costs_no_compile() -> None:
    def make(model: nn.Module) -> list[Optimizer]:
        rate = torch.tensor(1e-2, dtype=torch.float64)
        return [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, foreach=False)]

    eager = train(make, functools.partial(lr.CosineAnnealingLR, T_max=5))
    ours = train(make, functools.partial(lr.CosineAnnealingLR, T_max=5), cotrain())
    torch.testing.assert_close(ours, eager)
    assert graphs() == 1


def test_what_keeps_floats_inputs_on_older_versions_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[StepGraph] = []

    def note(step: StepGraph, *_: object) -> Callable[[list[Any]], Any]:
        seen.append(step)
        return lambda inputs: step.module(*inputs)

    monkeypatch.setattr(scalars, "INPUTS_ARE_HIDDEN", True)
    with compiling_with(note):
        train(OPTIMIZERS["sgd"], lambda o: ByHand(o, ["lr"]), cotrain())
    first, second = seen
    rates = [len(step.inputs) - len(first.inputs) for step in seen]
    assert rates == [0, 1]
    products = second.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert products
    assert all(product.users for product in products)


def test_a_rate_in_a_tensor_that_the_step_changes_is_sent_to_updates_on_the_host() -> None:
    def parameters(compile_with: Callable[[Step], Step]) -> list[Tensor]:
        torch.manual_seed(SEED)
        model = nn.Linear(12, 4)
        rate = torch.tensor(1e-2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            rate.mul_(0.5)
            optimizer.step()

        run = compile_with(step)
        for _ in range(3):
            run(*vectors())
        return [*model.parameters(), rate]

    eager = parameters(lambda step: step)
    ours = parameters(cotrain(policy="zero-offload", host_kernels="captured"))
    torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_an_optimizer_that_the_step_reaches_in_two_ways_is_traced_once() -> None:
    class Parts:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    def states(compile_with: Callable[[Step], Step]) -> list[Tensor]:
        torch.manual_seed(SEED)
        model = nn.Linear(12, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        parts = Parts(optimizer)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
            for p in model.parameters():
                parts.optimizer.state[p]["momentum_buffer"].mul_(0.5)

        run = compile_with(step)
        for _ in range(2):
            run(*vectors())
        return [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]

    torch.testing.assert_close(states(cotrain()), states(lambda step: step), rtol=0, atol=0)
