"""Updates on guesses leave the bits of updates that wait for the norm, whatever it turns out to be.

A step clips where its loss is scaled up, which is an input of its own here, and not where it is
scaled down.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cotrain_compile.backends.eager.calls import Call
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.deferred import wait_for_deferred
from cotrain_compile.entry.compiled import scalars
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan, UpdateMode
from cotrain_compile.presets import find
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.host.speculation import Confirm, Speculation
from tests.support.captured_steps import (
    Captured,
    Training,
    captured_training,
    differences,
    make_lean_mlp,
    place_step,
)
from tests.support.random_problems import PLENTY
from tests.support.steps import CASES, OPTIMIZERS, Batch, Case, Step, make_step
from tests.support.thread_card import ThreadCard

# Of the loss: far below the norm that is clipped to, far above it, and what no number is.
FREE, CLIPPED = 1e-3, 1e3


def scaled_loss(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return CASES["mlp"].loss_of(model, x, y) * scale


def make_batch() -> Batch:
    return (*CASES["mlp"].make_batch(), torch.tensor(1.0))


def make_with_scaler(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_of: Callable[..., Tensor]
) -> Step:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        return loss

    return step


def make_without_limit(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_of: Callable[..., Tensor]
) -> Step:
    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


CASE = Case(make_lean_mlp, make_batch, scaled_loss)
MAKERS = {
    "clipped": make_step,
    "with a scaler": make_with_scaler,
    "without a limit": make_without_limit,
}


def training(*scales: float, make: str = "clipped") -> Captured:
    step = captured_training(Training(CASE, OPTIMIZERS["adamw"], MAKERS[make]))
    torch.manual_seed(1)
    batches = ((*make_batch()[:-1], torch.tensor(scale)) for scale in scales)
    return replace(step, batches=tuple(batches))


@functools.cache
def machine() -> Machine:
    """Whose host has time for every update before the norm is known."""
    found = find("this-machine")
    device = replace(found.device, flops_per_s={"float32": 1e5}, bytes_per_s=1e6)
    return found.but(name="slow device", device=device)


def plan_on_guesses(step: Captured, *, on_host: bool = False, overlap_steps: bool = False) -> Plan:
    problem = step.problem(machine())
    placement = rule("coarse")(problem.dataflow)
    if on_host:
        homes = {**placement.homes, **dict.fromkeys(placement.updates, Tier.HOST)}
        modes = dict.fromkeys(placement.updates, UpdateMode.HOST_STREAMED)
        placement = replace(placement, homes=homes, updates=modes)
    placement = replace(
        placement, speculative=tuple(placement.updates), overlap_steps=overlap_steps
    )
    plan = schedule(problem, placement)
    check(problem, plan)
    assert len(plan.speculations) == len(plan.host_updates) == len(placement.updates)
    return plan


def after_each_step(step: Captured, run: Callable[[list[Any]], Any]) -> list[Any]:
    """What every step returns, and all tensors as it leaves them, as bits."""

    def run_and_look(inputs: list[Any]) -> list[Any]:
        outputs = run(inputs)
        wait_for_deferred()
        return [v.clone() if isinstance(v, Tensor) else v for v in (*outputs, *inputs)]

    return [_bits(value) for value in step.train(run_and_look)]


def _bits(value: Any) -> Any:
    """So that NaNs are equal where they have the same bits."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return (
        value.contiguous().view(torch.uint8)
        if is_float and value.dim()
        else (value.reshape(1).view(torch.uint8) if is_float else value)
    )


def unplaced(step: Captured) -> list[Any]:
    return after_each_step(step, lambda inputs: list(step.step.module(*inputs)))


def speculations(compiled: CompiledStep) -> list[Speculation]:
    kernels = compiled._device._kernels.values()
    return [kernel.speculation for kernel in kernels if isinstance(kernel, Confirm)]


SCALES = {
    "never clipped": (FREE,) * 3,
    "always clipped": (CLIPPED,) * 3,
    "in turn": (FREE, CLIPPED) * 8,
    "not a number": (FREE, math.nan),
    "infinite": (FREE, math.inf),
}


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("overlap_steps", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_every_step_leaves_the_bits_of_the_captured_graph(
    scales: str, overlap_steps: bool, on_host: bool
) -> None:
    """So do all tensors after each step, in no more memory than the checker says."""
    step = training(*SCALES[scales])
    plan = plan_on_guesses(step, on_host=on_host, overlap_steps=overlap_steps)
    compiled = place_step(step, plan, machine())
    assert not differences(after_each_step(step, compiled), unplaced(step))
    wrong = sum(scale != FREE for scale in SCALES[scales])
    for speculation in speculations(compiled):
        assert not speculation.at_stake
        assert (speculation.gate.steps, speculation.gate.wrong) == (len(SCALES[scales]), wrong)
    assert compiled.measured is not None
    most = replay(step.dataflow, plan, machine().host_update.workers)[Tier.HOST].nbytes
    assert compiled.measured.peak_bytes[Tier.HOST] <= most


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_so_does_the_runtime_of_a_card_whose_copies_are_streams(overlap_steps: bool) -> None:
    step = training(FREE, CLIPPED, FREE, math.inf)
    plan = plan_on_guesses(step, overlap_steps=overlap_steps)
    card = ThreadCard(0)
    pool = PinnedPool(card.pin, card.unpin, lambda: PLENTY)
    graph = run_passes(step.step, plan)
    device = CudaDevice(card, pool, PLENTY, host_kernels(graph, "captured"))
    compiled = CompiledStep(step.problem(machine()), plan, graph, device)
    assert not differences(after_each_step(step, compiled), unplaced(step))
    assert not card.faults
    assert all(speculation.gate.wrong == 2 for speculation in speculations(compiled))


@pytest.mark.parametrize("make", ["with a scaler", "without a limit"])
def test_so_do_a_step_that_a_scaler_skips_and_one_that_clips_to_no_norm(make: str) -> None:
    step = training(FREE, CLIPPED, math.inf, FREE, CLIPPED, make=make)
    compiled = place_step(step, plan_on_guesses(step), machine())
    assert not differences(after_each_step(step, compiled), unplaced(step))
    (_, flags) = step.dataflow.updates[0].scalars if make == "with a scaler" else ("", "")
    found = {name for task in compiled.plan.speculations for name in task.guesses}
    assert not flags or flags in found


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_before_the_norm_is_known_leaves_all_as_it_was(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though updates on guesses have overwritten parameters by then; the next step is as ever."""
    step = training(FREE, FREE)
    compiled = place_step(step, plan_on_guesses(step, on_host=True), machine())
    program: Any = compiled._program
    run_call, armed = program.run_call, [False]

    def run_or_fail(call: Call) -> Any:
        if call.node.name == "clamp" and armed[0]:
            compiled._device.drain()
            assert all(speculation.at_stake for speculation in speculations(compiled))
            armed[0] = False
            raise error("before the norm")
        return run_call(call)

    monkeypatch.setattr(program, "run_call", run_or_fail)

    def run(inputs: list[Any]) -> Any:
        before = [v.clone() if isinstance(v, Tensor) else v for v in inputs]
        armed[0] = True
        with pytest.raises(error) as raised:
            compiled(inputs)
        assert "No parameter or optimizer state was changed" in raised.value.__notes__[-1]
        assert not differences(inputs, before)
        return compiled(inputs)

    assert not differences(after_each_step(step, run), unplaced(step))


def test_a_shut_gate_holds_guesses_back_until_steps_are_free_again() -> None:
    step = training(*[FREE] * 30, *[CLIPPED] * 8, *[FREE] * 40)
    plan = plan_on_guesses(step)
    compiled = place_step(step, plan, machine())
    saved: list[bool] = []
    for speculation in speculations(compiled):
        speculation.gate.pays_below = 0.2
    guesses = compiled.guesses
    assert guesses is not None

    def run(inputs: list[Any]) -> Any:
        saved.append(guesses.is_open)
        return compiled(inputs)

    assert not differences(after_each_step(step, run), unplaced(step))
    # Before the first step nothing is known of clipping: a step that waits is never the slower one.
    assert [saved[0], saved[29], saved[38], saved[-1]] == [False, True, False, True]
    assert (guesses.steps, guesses.wrong) == (78, 8)
    assert scalars(compiled)["wrong_guesses_share"] == guesses.wrong_share
    assert scalars(compiled)["guesses"] == 1.0


def test_the_placed_step_is_in_no_race() -> None:
    step = training(FREE)
    for overlap_steps in (False, True):
        plan = plan_on_guesses(step, overlap_steps=overlap_steps)
        assert find_race_in(run_passes(step.step, plan)) is None
