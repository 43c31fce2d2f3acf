"""A captured `GradScaler` skips, scales and counts as in eager, and the step stays one graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.plan import UpdateMode
from cotrain_compile.runtime.host import kernels as kernels
from cotrain_compile.runtime.host.captured_kernels import CapturedKernel
from cotrain_compile.runtime.host.fused_kernel import FusedKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.host.match_update import Match, match_update
from tests.support.captured_steps import make_two_layers
from tests.support.loops import EACH_POLICY
from tests.support.scaled_steps import (
    FP16_ROUNDING,
    MAKERS,
    ROUNDING,
    SKIPPED,
    MakeStep,
    assert_as_eager,
    assert_close,
    batches,
    graphs,
    loss_of,
    make_accumulating,
    make_clipping,
    make_in_fp16,
    placed,
    train,
)
from tests.support.steps import OPTIMIZERS, SEED, Step, all_tensors, cotrain

# Two of these run fused loops on the host, below; Muon is a second optimizer beside SGD.
SKIPPED_OFTEN = ("muon",)


@pytest.mark.parametrize("policy", EACH_POLICY)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=pytest.mark.long if name == "one of two" else ())
        for name, make in MAKERS.items()
    ],
    ids=MAKERS,
)
def test_a_scaled_step_is_one_graph_with_eagers_numbers(make: MakeStep, policy: str) -> None:
    optimizer = "adamw" if make is make_clipping else "sgd"
    left, compiles, compiled = placed(make, optimizer, policy)
    assert_close(left, train(make, optimizer), FP16_ROUNDING if make is make_in_fp16 else ROUNDING)
    assert compiles == 1
    if policy == "zero-offload":
        assert set(compiled.plan.placement.updates.values()) == {UpdateMode.HOST_STREAMED}


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name in SKIPPED_OFTEN else pytest.mark.long)
        for name in OPTIMIZERS
        if name != "adamw"
    ],
)
def test_every_optimizer_can_be_skipped(optimizer: str) -> None:
    left, compiles, _ = placed(make_clipping, optimizer, "zero-offload")
    assert_close(left, train(make_clipping, optimizer))
    assert compiles == 1


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_a_skipped_step_changes_no_bit_but_the_scale(policy: str) -> None:
    left, *_ = placed(make_clipping, "adamw", policy)
    names = [name.partition(" ")[2] for name in left if name.startswith("0 ")]
    for number, skipped in enumerate(SKIPPED[1:], start=1):
        if skipped:
            scale = left[f"{number} scaler"]["scale"]
            assert scale == left[f"{number - 1} scaler"]["scale"] / 2
            for name in set(names) - {"loss", "scaler"}:
                assert torch.equal(left[f"{number} {name}"], left[f"{number - 1} {name}"])


def test_a_disabled_scaler_changes_nothing() -> None:
    assert_as_eager(make_accumulating_finite, enabled=False)


def make_accumulating_finite(
    model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler
) -> Step:
    plain = make_accumulating(model, optimizers, scaler)

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x.nan_to_num(posinf=1.0), y)

    return step


def test_the_scale_can_be_updated_outside_the_step() -> None:
    def make(model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler) -> Step:
        (optimizer,) = optimizers

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
            return loss

        return step

    def run(compile_with: Callable[[Step], Step]) -> Any:
        torch.manual_seed(SEED)
        model = make_two_layers().double()
        optimizers = OPTIMIZERS["sgd"](model)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        step = compile_with(make(model, optimizers, scaler))
        scales = []
        for batch in batches():
            step(*batch)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, all_tensors(model, optimizers)

    assert_close(run(cotrain()), run(lambda step: step))
    assert graphs() == 1


def test_a_fused_optimizer_is_unscaled_before_its_update() -> None:
    """In eager the fused kernel divides by the scale; the captured step does it beforehand."""

    def make(model: nn.Module, _: Sequence[Optimizer], scaler: GradScaler) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return make_accumulating(model, [optimizer], scaler)

    assert_as_eager(make)


def kernels_of(optimizer: str) -> set[type]:
    """What runs the host updates of a scaled step."""
    *_, compiled = placed(make_clipping, optimizer, "zero-offload")
    return {type(kernel) for kernel in host_kernels(compiled.graph, "fused").values()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_scaled_updates_on_the_host_run_fused_loops(optimizer: str) -> None:
    assert kernels_of(optimizer) == {FusedKernel}


def test_a_fused_loop_that_does_not_skip_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_skips(*given: Any) -> Match | None:
        match = match_update(*given)
        return replace(match, skip=None) if match is not None else None

    monkeypatch.setattr(kernels, "match_update", never_skips)
    assert kernels_of("adamw") == {CapturedKernel}


def test_a_fused_loop_that_always_skips_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: FusedKernel, inputs: Sequence[Any], meter: Any) -> None: ...

    monkeypatch.setattr(FusedKernel, "__call__", never)
    assert kernels_of("adamw") == {CapturedKernel}


@pytest.mark.parametrize("count", [1, 2])
def test_parameters_of_one_element_are_scaled_and_skipped(count: int) -> None:
    """The flag has one element too. Of a single parameter, the inverse scale is part of its update,
    and the scale has changed by the time that runs on the host."""
    weights = [nn.Parameter(torch.tensor([2.0])) for _ in range(count)]
    optimizer = torch.optim.Adam(weights, lr=0.1, eps=1.0)  # the size of a gradient matters
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale((sum(weights) * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    compiled = cotrain(policy="zero-offload")(step)
    compiled(torch.full((3,), math.inf))
    assert weights == [2.0] * count
    compiled(torch.ones(3))
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.tensor([2.0 - 0.1 * 3 / (3 + 1)]))
    if count > 1:
        placed = cotrain_compile.inspect(compiled).graph
        assert {type(k) for k in host_kernels(placed, "fused").values()} == {FusedKernel}


def test_a_scaler_goes_on_in_eager_and_comes_back() -> None:
    def make_switching(
        model: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler
    ) -> Step:
        plain = make_clipping(model, optimizers, scaler)
        compiled = cotrain()(plain)
        turns = iter([compiled, plain, plain, compiled] * 2)
        return lambda *batch: next(turns)(*batch)

    ours, eager = train(make_switching), train(make_clipping)
    assert_close(ours, eager)
    assert graphs() == 1
