"""Gradients kept in `.grad` across calls rest where their parameters do, on the host too.

A loop of micro-steps and updates runs with a random plan for each of its graphs, in exactly the
memory of the slot model, and leaves what eager leaves, to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.errors import PlanError
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.machine.op_classes import OpKind
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.support.captured_steps import make_lean_mlp
from tests.support.dataflow_text import parse, text
from tests.support.plans.random_plans import random_plan
from tests.support.steps import (
    SEED,
    Step,
    all_tensors,
    check_peak,
    compiling_with,
    cotrain,
    cross_entropy,
    vectors,
)

CYCLES = 2
MICRO_BATCHES = 3

CompileWith = Callable[[Step], Step]
MakeLoop = Callable[[nn.Module, Optimizer, CompileWith], Step]


def clipped(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    return two_functions(model, optimizer, compile_with, clips=True)


def unclipped(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    return two_functions(model, optimizer, compile_with, clips=False)


def two_functions(
    model: nn.Module, optimizer: Optimizer, compile_with: CompileWith, *, clips: bool
) -> Step:
    def micro_step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y) / MICRO_BATCHES
        loss.backward()
        return loss

    def update() -> Any:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clips else None
        optimizer.step()
        optimizer.zero_grad()
        return norm

    add_up, update = compile_with(micro_step), compile_with(update)

    def run(x: Tensor, y: Tensor, is_last: bool) -> Any:
        loss = add_up(x, y)
        return (loss, update()) if is_last else loss

    return run


def one_function(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    def step(x: Tensor, y: Tensor, is_last: bool) -> Tensor:
        loss = cross_entropy(model, x, y) / MICRO_BATCHES
        loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return compile_with(step)


def kept_whole(model: nn.Module, optimizer: Optimizer, compile_with: CompileWith) -> Step:
    """A whole step whose gradients stay to be looked at."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = compile_with(step)
    return lambda x, y, is_last: compiled(x, y)


LOOPS = (clipped, unclipped, one_function, kept_whole)


def make_training() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(SEED)
    model = make_lean_mlp().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def train(make: MakeLoop, compile_with: CompileWith = lambda step: step) -> list[Any]:
    """What each call returns and leaves, gradients too."""
    model, optimizer = make_training()
    run = make(model, optimizer, compile_with)
    left: list[Any] = []
    for call in range(CYCLES * MICRO_BATCHES):
        x, y = vectors()
        returned = run(x.double(), y, call % MICRO_BATCHES == MICRO_BATCHES - 1)
        left += [value.detach().clone() for value in _tensors_in(returned)]
        left += [t.clone() for t in all_tensors(model, [optimizer]).values()]
        left += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return left


def _tensors_in(returned: Any) -> list[Tensor]:
    return [value for value in tree_leaves(returned) if isinstance(value, Tensor)]


def assert_same_bits(ours: Sequence[Any], eager: Sequence[Any]) -> None:
    torch.testing.assert_close(list(ours), list(eager), rtol=0, atol=0)


def as_text_has_it(dataflow: Dataflow) -> Dataflow:
    """Its text says neither of what kind an op is nor what may run in parts."""
    ops = (replace(op, kind=OpKind.UNSAID) for op in dataflow.ops)
    return replace(dataflow, ops=tuple(ops), regions=())


class RandomPlans:
    """Compiles each graph with a random plan; after each call its memory is the plan's."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.compiled: list[CompiledStep] = []

    def __call__(self, step: StepGraph, dataflow: Dataflow, _: Options) -> Step:
        machine = find("this-machine")
        problem = formulate(dataflow, machine, Options().budgets(machine))
        assert parse(text(dataflow)) == as_text_has_it(dataflow.for_machines())
        plan = self._plan(problem)
        check(problem, plan)
        placed = run_passes(step, plan)
        assert find_race_in(placed) is None
        device = EmulatedDevice(machine, plan.budgets, host_kernels(placed, "captured"))
        compiled = CompiledStep(problem, plan, placed, device)
        self.compiled.append(compiled)
        most = replay(dataflow, plan)[Tier.HOST].nbytes

        def run(inputs: list[Any]) -> Any:
            outputs = compiled(inputs)
            assert compiled.measured is not None
            peak = compiled.measured.peak_bytes
            assert peak[Tier.DEVICE] == plan.budgets[Tier.DEVICE]
            assert peak[Tier.HOST] <= most
            return outputs

        return run

    def _plan(self, problem: Problem) -> Plan:
        """At random, but with a gradient on the host where the graph keeps any."""
        plan = random_plan(problem, self.rng)
        while problem.dataflow.kept_gradients and not _gradients_on_host(problem.dataflow, plan):
            plan = random_plan(problem, self.rng)
        return plan

    def gradients_on_host(self) -> int:
        return sum(_gradients_on_host(c.problem.dataflow, c.plan) for c in self.compiled)


def _gradients_on_host(dataflow: Dataflow, plan: Plan) -> int:
    return sum(
        dataflow.buffer[name].role is Role.GRADIENT and tier is Tier.HOST
        for name, tier in plan.placement.homes.items()
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 40))]
)
@pytest.mark.parametrize(
    "make", [pytest.param(m, marks=pytest.mark.long if m is unclipped else ()) for m in LOOPS]
)
def test_random_plans_leave_the_gradients_of_eager(make: MakeLoop, seed: int) -> None:
    plans = RandomPlans(f"{make.__name__} {seed}")
    with compiling_with(plans):
        ours = train(make, cotrain(keep_grads=True))
    assert_same_bits(ours, train(make))
    assert plans.gradients_on_host() > 0


def test_a_plan_with_a_gradient_away_from_its_parameter_is_refused() -> None:
    plans = RandomPlans("together")
    model, optimizer = make_training()
    with compiling_with(plans):
        run = clipped(model, optimizer, cotrain(keep_grads=True))
        x, y = vectors()
        run(x.double(), y, True)
    compiled = plans.compiled[-1]
    plan, kept = compiled.plan, compiled.problem.dataflow.kept_gradients
    param, (gradient,) = next(iter(kept.items()))
    home = Tier.HOST if plan.placement.homes[param] is Tier.DEVICE else Tier.DEVICE
    homes = {**plan.placement.homes, gradient: home}
    apart = replace(plan, placement=replace(plan.placement, homes=homes))
    with pytest.raises(PlanError, match=rf"lies in the \.grad of {param}, is not at home where"):
        check(compiled.problem, apart)


# The plans that the solver makes.

# Of what the largest graph of each function takes with everything on the device.
SHARES = (0.5, pytest.param(0.7, marks=pytest.mark.long))


def within(share: float, peaks: dict[str, int], **options: Any) -> CompileWith:
    """Compile for `share` of the peak that the graphs of a function have with all of it there."""

    def compile_with(step: Step) -> Step:
        compiled = cotrain(
            keep_grads=True,
            host_kernels="captured",
            memory_budget=int(share * peaks[step.__name__]),
            **options,
        )(step)

        def run(*args: Any) -> Any:
            returned = compiled(*args)
            check_peak(compiled)
            report = cotrain_compile.inspect(compiled).plan.report
            assert report is None or report.gap >= 0  # a bound is below every plan
            return returned

        return run

    return compile_with


def resident_peaks(make: MakeLoop) -> dict[str, int]:
    """The peak of each function in a loop with everything on the device, of its largest graph."""
    peaks: dict[str, int] = {}

    def compile_with(step: Step) -> Step:
        compiled = cotrain(keep_grads=True, policy="resident")(step)

        def run(*args: Any) -> Any:
            returned = compiled(*args)
            peak = cotrain_compile.inspect(compiled).predicted.peak_bytes[Tier.DEVICE]
            peaks[step.__name__] = max(peak, peaks.get(step.__name__, 0))
            return returned

        return run

    train(make, compile_with)
    torch._dynamo.reset()
    return peaks


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "make",
    [pytest.param(m, marks=() if m is kept_whole else pytest.mark.long) for m in LOOPS],
)
def test_plans_for_less_than_the_resident_peak_leave_the_gradients_of_eager(
    make: MakeLoop, share: float
) -> None:
    eager, peaks = train(make), resident_peaks(make)
    assert_same_bits(train(make, within(share, peaks, verify=2)), eager)
