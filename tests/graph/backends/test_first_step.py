"""The first step: a dry run out of memory changes nothing, and a smaller plan follows."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.dry_run import LEAST_STEP
from cotrain_compile.entry import compile_step as pipeline
from cotrain_compile.errors import OutOfDeviceMemory, PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.support.units import format_bytes

WIDTH, BATCH = 64, 256
COUNT = MemoryMeter.count


class Training:
    """A model with dropout whose activations may leave, and its step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        ]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-2, momentum=0.9, foreach=False
        )

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def compiled(self, **options: Any) -> Callable[[Tensor], Tensor]:
        """Planned by the greedy unless told otherwise: by which rule is not what is tried here."""
        torch._dynamo.reset()
        step: Callable[[Tensor], Tensor] = torch.compile(
            self.step, backend="cotrain", options={"policy": "greedy", **options}
        )
        return step

    def run(self, step: Callable[[Tensor], Tensor], steps: int = 3) -> list[Tensor]:
        torch.manual_seed(5)
        losses = [step(torch.randn(BATCH, WIDTH)).detach() for _ in range(steps)]
        return [*losses, *self.tensors()]

    def tensors(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@contextmanager
def hidden_memory(nbytes: int) -> Iterator[None]:
    """Every linear layer takes `nbytes` that no plan knows of, for as long as its result lives."""

    def count(self: MemoryMeter, storage: Any, tier: Tier, where: str, size: int) -> None:
        COUNT(self, storage, tier, where, size + (nbytes if where.startswith("addmm") else 0))

    with mock.patch.object(MemoryMeter, "count", count):
        yield


@contextmanager
def noting_plans() -> Iterator[list[CompiledStep]]:
    """What has been compiled within it."""
    found: list[CompiledStep] = []
    compile_step = pipeline.compile_step

    def note(*arguments: Any, **named: Any) -> CompiledStep:
        found.append(compile_step(*arguments, **named))
        return found[-1]

    with mock.patch.object(pipeline, "compile_step", note):
        yield found


@functools.cache
def resident_peak_bytes() -> int:
    training = Training()
    step = training.compiled(policy="resident")
    training.run(step, steps=1)
    return cotrain_compile.inspect(step).predicted.peak_bytes[Tier.DEVICE]


def test_a_dry_run_leaves_training_and_random_numbers_as_they_were() -> None:
    dry_run_first, eager = Training(), Training()
    found = dry_run_first.run(dry_run_first.compiled(host_kernels="captured", policy="coarse"))
    torch.testing.assert_close(found, eager.run(eager.step), rtol=1e-3, atol=1e-4)


def test_a_step_that_takes_more_than_planned_is_planned_again_and_exact() -> None:
    budget = resident_peak_bytes()
    options = {"host_kernels": "captured", "memory_budget": budget}
    known, surprised = Training(), Training()
    expected = known.run(known.compiled(**options))
    with hidden_memory(1000), noting_plans() as plans:
        step = surprised.compiled(**options)
        with pytest.warns(
            UserWarning, match=r"ran out of it; nothing was changed, and it is planned"
        ):
            found = surprised.run(step)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    budgets = [compiled.problem.budgets[Tier.DEVICE] for compiled in plans]
    assert 2 <= len(budgets) <= 4
    assert budgets == sorted(set(budgets), reverse=True)
    last = cotrain_compile.inspect(step)
    assert last is plans[-1]
    assert last.plan.budgets[Tier.DEVICE] == budget
    assert last.measured is not None
    peak = last.measured.peak_bytes[Tier.DEVICE]
    assert peak == last.dry_run_device_bytes
    assert last.predicted.peak_bytes[Tier.DEVICE] < peak <= budget
    assert "a dry run took" in last.plan.notes[-1]


def test_a_plan_for_less_may_take_the_whole_budget() -> None:
    """Held to what it was planned for, each plan would fail by what no plan knows of."""
    training, budget = Training(), resident_peak_bytes() // 2
    with hidden_memory(20_000), noting_plans() as plans, pytest.warns(match="planned again"):
        training.run(training.compiled(memory_budget=budget, policy="auto"))
    last = plans[-1]
    assert last.dry_run_device_bytes is not None
    assert last.problem.budgets[Tier.DEVICE] < last.dry_run_device_bytes <= budget


def test_the_second_plan_knows_what_is_behind_the_place_where_the_first_ran_out() -> None:
    """The first op above the budget is so by a little, others behind it by much more."""
    training, budget = Training(), resident_peak_bytes()
    with hidden_memory(40_000), noting_plans() as plans, pytest.warns(match="planned again"):
        training.run(training.compiled(memory_budget=budget))
    assert len(plans) == 2
    assert plans[-1].dry_run_device_bytes is not None
    assert plans[-1].dry_run_device_bytes <= budget


def test_where_a_twentieth_less_does_not_fit_only_what_is_missing_comes_off() -> None:
    training = Training()
    with pytest.raises(PlacementError) as refusal:
        training.compiled(memory_budget=1)(torch.randn(BATCH, WIDTH))
    budget = 1 + refusal.value.shortfall_bytes + 1200
    with hidden_memory(1000), noting_plans() as plans, pytest.warns(match="planned again"):
        training.run(training.compiled(memory_budget=budget))
    last = plans[-1]
    assert last.problem.budgets[Tier.DEVICE] > (1 - LEAST_STEP) * budget
    assert last.dry_run_device_bytes is not None
    assert last.dry_run_device_bytes <= budget


def test_a_card_that_has_less_than_planned_is_planned_for_with_what_it_had() -> None:
    """A card fails below the plan: another process has the rest of its memory."""
    training, budget = Training(), resident_peak_bytes()
    limit = int(0.8 * budget)
    dry_run = CompiledStep.dry_run

    def on_a_small_card(self: CompiledStep, inputs: Any, *, again: bool = False) -> None:
        dry_run(self, inputs, again=again)
        if self.peak_bytes[Tier.DEVICE] > limit:
            self._device.meter.peak_bytes[Tier.DEVICE] = limit - 1000
            raise torch.OutOfMemoryError("the card is full")

    with (
        mock.patch.object(CompiledStep, "dry_run", on_a_small_card),
        noting_plans() as plans,
        pytest.warns(UserWarning, match="planned again"),
    ):
        training.run(training.compiled(memory_budget=budget))
    assert len(plans) == 2
    assert plans[-1].problem.budgets[Tier.DEVICE] == limit - 1000


@contextmanager
def full_card_in(
    compiled: list[CompiledStep], *, at: int, of_step: int, once: bool
) -> Iterator[None]:
    """The allocator has nothing left at linear layer `at` of a step, of the first plan alone."""
    layers = 0

    def count(self: MemoryMeter, storage: Any, tier: Tier, where: str, size: int) -> None:
        nonlocal layers
        COUNT(self, storage, tier, where, size)
        if where.startswith("addmm") and compiled[-1].steps == of_step - 1 and layers < at:
            layers += 1
            if layers == at:
                layers = at if once else 0
                raise torch.OutOfMemoryError("CUDA out of memory")

    with mock.patch.object(MemoryMeter, "count", count):
        yield


def test_numbers_of_updates_that_went_to_the_host_are_in_nobodys_way_in_a_dynamic_step() -> None:
    """They are tensors there, and no op of the device reads them once a repair has sent updates."""
    options: dict[str, Any] = {
        "policy": "greedy",
        "memory_budget": int(0.8 * resident_peak_bytes()),
    }
    placed, eager = Training(), Training()
    torch._dynamo.reset()
    step = torch.compile(placed.step, backend="cotrain", dynamic=True, options=options)
    for train in (step, eager.step):
        torch.manual_seed(5)
        for rows in (BATCH // 2, BATCH):
            train(torch.randn(rows, WIDTH))
    torch.testing.assert_close(placed.tensors(), eager.tensors(), rtol=1e-3, atol=1e-4)
    assert cotrain_compile.inspect(step).plan.transfers


@pytest.mark.parametrize("share", [0.8, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_later_step_without_room_is_planned_and_run_again_and_exact(share: float) -> None:
    """Its dropouts are drawn again as they were, and what was planned keeps to the exact peak."""
    undisturbed, disturbed = Training(), Training()
    budget = int(share * resident_peak_bytes())
    options = {"host_kernels": "captured", "memory_budget": budget}
    expected = undisturbed.run(undisturbed.compiled(**options), steps=5)
    with noting_plans() as plans:
        step = disturbed.compiled(**options)
        # The dry run has four layers, too, in which no step has been.
        with (
            full_card_in(plans, at=3, of_step=3, once=True),
            pytest.warns(
                UserWarning,
                match=r"a step took .* ran out of it; nothing was changed, and it is planned",
            ),
        ):
            found = disturbed.run(step, steps=5)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(plans) == 2
    assert plans[1].steps == 3


def test_a_later_step_that_never_finds_room_ends_in_its_error_and_has_changed_nothing() -> None:
    training = Training()
    with noting_plans() as plans:
        step = training.compiled(memory_budget=resident_peak_bytes())
        training.run(step, steps=2)
        before, plans[-1].steps = training.tensors(), 0  # from here on as the plans to come
        with (
            full_card_in(plans, at=2, of_step=1, once=False),
            pytest.warns(UserWarning, match="planned again"),
            pytest.raises(torch.OutOfMemoryError, match="No parameter or optimizer state"),
        ):
            step(torch.randn(BATCH, WIDTH))
    assert len(plans) > 1
    torch.testing.assert_close(training.tensors(), before, rtol=0, atol=0)
    torch.testing.assert_close(step(torch.ones(BATCH, WIDTH)).isfinite(), torch.tensor(True))


def test_a_new_trace_keeps_to_what_the_card_had_unless_nothing_fits_into_that() -> None:
    made: list[int | None] = []

    def compile_for(plan_bytes: int | None) -> Any:
        made.append(plan_bytes)
        if plan_bytes == 1:
            raise PlacementError("too little", shortfall_bytes=1)
        return plan_bytes

    for limits, tried in (([2, None], [2]), ([1, None], [1, None]), ([None, None], [None])):
        made.clear()
        found: Any = pipeline.first_that_fits(compile_for, limits)
        assert (found, made) == (tried[-1], tried)
    with pytest.raises(PlacementError, match="too little"):
        pipeline.first_that_fits(compile_for, [1])


@pytest.mark.parametrize("hidden_bytes", [1000, 10_000_000])
def test_without_a_smaller_plan_the_error_reaches_the_user_and_nothing_has_changed(
    hidden_bytes: int,
) -> None:
    training = Training()
    before = training.tensors()
    step = training.compiled(policy="resident", memory_budget=resident_peak_bytes())
    with (
        hidden_memory(hidden_bytes),
        noting_plans() as plans,
        pytest.raises(OutOfDeviceMemory, match="out of memory on the device") as failure,
    ):
        step(torch.randn(BATCH, WIDTH))
    assert len(plans) == 1
    assert "No parameter" in str(failure.value)
    # What the plan may take of the budget is not called the budget, which may be all gone.
    left = "nothing" if hidden_bytes > resident_peak_bytes() else r"\S+ KiB"
    budget = re.escape(format_bytes(resident_peak_bytes()))
    told = rf"Less does not fit: of memory_budget, {budget}, a plan has {left} beside what kernels"
    assert re.search(told, str(failure.value))
    assert "memory_budget is" not in str(failure.value)
    assert "Raise memory_budget by" in str(failure.value)
    assert all(torch.equal(a, b) for a, b in zip(before, training.tensors(), strict=True))


@pytest.mark.filterwarnings("ignore:.*planned again")
@pytest.mark.parametrize("policy", ["greedy", pytest.param("resident", marks=pytest.mark.long)])
def test_a_step_that_every_plan_leaves_above_the_budget_is_refused_in_every_call(
    policy: str,
) -> None:
    """A card has the memory, so the dry run comes to its end, but the budget says less."""
    training = Training()
    before = training.tensors()
    dry_run = CompiledStep.dry_run

    def on_a_large_card(self: CompiledStep, inputs: Any, *, again: bool = False) -> None:
        dry_run(self, inputs, again=again)
        self._device.meter.peak_bytes[Tier.DEVICE] = self.allowed_bytes + 2048

    step = training.compiled(policy=policy, memory_budget=resident_peak_bytes())
    with mock.patch.object(CompiledStep, "dry_run", on_a_large_card), noting_plans() as plans:
        for _ in range(2):
            with pytest.raises(
                OutOfDeviceMemory, match=r"needs .* on the device, budget"
            ) as failure:
                step(torch.randn(BATCH, WIDTH))
            assert "Raise memory_budget by 2.0 KiB or more" in str(failure.value)
    assert (len(plans) > 1) == (policy == "greedy")
    assert all(plan.steps == 0 for plan in plans)
    assert all(torch.equal(a, b) for a, b in zip(before, training.tensors(), strict=True))


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), None])
def test_no_batch_is_kept_alive(dynamic: bool | None) -> None:
    training = Training()
    torch._dynamo.reset()
    step: Any = torch.compile(
        training.step, backend="cotrain", options={"policy": "coarse"}, dynamic=dynamic
    )
    batches = [torch.randn(BATCH - 8 * n, WIDTH) for n in range(3 if dynamic is None else 1)]
    for batch in batches:
        step(batch)
    left = [weakref.ref(batch) for batch in batches]
    del batch, batches
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)
