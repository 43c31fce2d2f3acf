"""The CUDA runtime on a card of threads: every random plan is exact, nothing is freed too early.

The card is `thread_card.ThreadCard`; all else is what runs on CUDA: lanes, events, homes on pinned
slabs, the graph.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import HostMemoryError, PlacementError, StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import streamed, zero_offload
from cotrain_compile.placement.schedule import bundles
from cotrain_compile.placement.schedule.bundles import settled
from cotrain_compile.placement.schedule.list_scheduler import Tactics
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Lane, Placement, Plan, UpdateMode
from cotrain_compile.runtime.cuda import device as cuda
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.support import thread_card
from tests.support.captured_steps import TRAININGS, Captured, captured, differences, reference
from tests.support.plans.random_plans import last_moment_plan, random_plan
from tests.support.thread_card import ThreadCard

BY_LAYER = Tactics(by_layer=True)
LONG_ONLY = ("llama", "gpt2", "conv", "muon", "t5")
PLENTY = 1 << 40


class Placed:
    """A captured step placed on a card of threads."""

    def __init__(self, name: str, plan: Plan, seed: int = 0, **settings: Any) -> None:
        step = captured(name)
        self.card = ThreadCard(seed)
        self.pool = PinnedPool(self.card.pin, self.card.unpin, lambda: PLENTY)
        graph = run_passes(step.step, plan)
        device = CudaDevice(
            self.card, self.pool, PLENTY, host_kernels(graph, "captured"), **settings
        )
        self.device = device
        self.step = CompiledStep(step.problem(), plan, graph, device)


def plan_of(name: str, seed: int) -> Plan:
    return random_plan(captured(name).problem(), random.Random(f"{name} {seed}"))


def streamed_plan(name: str) -> Plan:
    """States at home on the host, everything updated on the device, at the last moment."""
    problem = captured(name).problem()
    return last_moment_plan(problem, streamed(problem.dataflow))


def host_plan(name: str) -> Plan:
    """Everything updated on the host, at the last moment."""
    problem = captured(name).problem()
    return last_moment_plan(problem, zero_offload(problem.dataflow))


def seeds(count: int) -> list[Any]:
    return [
        pytest.param(
            name, seed, marks=pytest.mark.long if name in LONG_ONLY or seed >= count else ()
        )
        for name in TRAININGS
        for seed in range(15 * count)
    ]


@pytest.mark.parametrize(("name", "seed"), seeds(2))
def test_a_random_plan_is_exact_on_streams(name: str, seed: int) -> None:
    placed = Placed(name, plan_of(name, seed), seed)
    assert not differences(captured(name).train(placed.step), reference(name))
    assert not placed.card.faults


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["clipped", "autocast-unclipped"])
def test_a_settled_plan_is_sound_holds_no_more_and_is_exact(name: str, seed: int) -> None:
    problem, plan = captured(name).problem(), plan_of(name, seed)
    before = place_plan(problem, plan)
    after = replace(before, tasks=tuple(settled(before)))
    assert all(b <= a for a, b in zip(before.device_bytes, after.device_bytes, strict=True))
    moved = replace(plan, tasks=after.tasks, predicted=predict(after))
    check(problem, moved)
    placed = Placed(name, moved, seed)
    assert not differences(captured(name).train(placed.step), reference(name))
    assert not placed.card.faults


def all_streamed(dataflow: Dataflow) -> Placement:
    """Every state at home on the host, however small."""
    base = streamed(dataflow)
    states = [state for group in dataflow.updates for state in group.states]
    return replace(
        base,
        homes={**base.homes, **dict.fromkeys(states, Tier.HOST)},
        updates=dict.fromkeys(base.updates, UpdateMode.STREAMED),
    )


@pytest.mark.parametrize("name", ["clipped", "unclipped"])
def test_updates_of_a_layer_at_one_place_are_sound_at_every_budget_and_exact(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight and bias wait for their states once; where that does not fit, it is refused.

    All of them are small here, and would come up together in a bundle.
    """
    monkeypatch.setattr(bundles, "FEWEST", sys.maxsize)
    problem = captured(name).problem()
    placement = all_streamed(problem.dataflow)
    alone = schedule(problem, placement)
    joined = schedule(problem, placement, tactics=BY_LAYER)
    waits = [len({t.wait_before for t in p.tasks if t.is_fetch}) for p in (alone, joined)]
    assert waits[0] == 2 * waits[1] == len(problem.dataflow.updates)
    least = schedule(problem, placement, tactics=Tactics(lookahead=0.0))
    tight, plenty = (p.predicted.peak_bytes[Tier.DEVICE] for p in (least, joined))
    plans = [joined]
    for budget in range(tight // 2, plenty + 1, max(1, plenty // 50)):
        small = problem.with_budget(Tier.DEVICE, budget)
        with suppress(PlacementError):
            plans.append(schedule(small, placement, tactics=BY_LAYER))
            check(small, plans[-1])
    assert 5 < len(plans) < 50
    for plan in plans[:2]:
        placed = Placed(name, plan)
        assert not differences(captured(name).train(placed.step), reference(name))
        assert not placed.card.faults


@pytest.mark.parametrize("seed", range(3))
def test_a_dry_run_changes_nothing(seed: int) -> None:
    step = captured("clipped")
    placed = Placed("clipped", plan_of("clipped", seed))
    before = [v.clone() if isinstance(v, Tensor) else v for v in step.inputs]
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in step.inputs]
    state = torch.get_rng_state()
    placed.step.dry_run(inputs)
    assert not differences(inputs, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert placed.step.steps == 0


def test_what_rests_on_the_host_is_pinned_and_stays_one_object() -> None:
    step = captured("tied")
    plan = host_plan("tied")
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in step.inputs]
    same = list(inputs)
    placed = Placed("tied", plan)
    placed.step(list(inputs))
    for value, old, item in zip(inputs, same, step.step.inputs, strict=True):
        assert value is old
        on_host = plan.placement.homes.get(item.name) is Tier.HOST
        assert placed.pool.holds(value) == on_host, item.name
    assert placed.pool.held_bytes == sum(placed.card.pinned.values()) > 0


def test_slabs_are_used_again_in_every_step() -> None:
    step = captured("clipped")
    placed = Placed("clipped", plan_of("clipped", 0))
    held: list[int] = []

    def run(inputs: list[Any]) -> Any:
        outputs = placed.step(inputs)
        held.append(placed.pool.held_bytes)
        return outputs

    step.train(run)
    assert held[0] > 0
    # How many copies are on the host at once depends on timing; what they need does not pile up.
    for _ in range(20):
        step.train(run)
    assert max(held) < 3 * held[0]


def test_memory_that_is_freed_before_its_copy_is_waited_for_is_noticed() -> None:
    step = captured("clipped")
    placed = Placed("clipped", streamed_plan("clipped"))
    with (
        mock.patch.object(placed.device, "wait"),
        mock.patch.object(placed.device, "finish_step", placed.card.synchronize),
        # Copies that are slower than a step's thread on a busy machine.
        mock.patch.object(thread_card, "LONGEST_DELAY_S", 2e-2),
    ):
        step.train(placed.step)
    assert placed.card.faults


def test_a_task_that_does_not_wait_for_what_it_comes_after_shows() -> None:
    step = captured("clipped")
    plan = host_plan("clipped")
    placed = Placed("clipped", plan)
    with mock.patch.object(cuda, "_ends", return_value=[]):
        found = step.train(placed.step)
    assert differences(found, reference("clipped"))


def test_a_copy_that_fails_reaches_the_user_once_and_nothing_hangs() -> None:
    step = captured("clipped")
    plan = streamed_plan("clipped")
    placed = Placed("clipped", plan)
    copies: list[int] = []
    copy = placed.card.copy

    def fail_late(stream: Any, destination: Tensor, source: Tensor) -> None:
        copies.append(source.nbytes)
        if len(copies) > 1:
            raise RuntimeError("the link is down")
        copy(stream, destination, source)

    inputs = [v.clone() if isinstance(v, Tensor) else v for v in step.inputs]
    with (
        mock.patch.object(placed.card, "copy", fail_late),
        pytest.raises((RuntimeError, StepFailed), match="the link is down"),
    ):
        placed.step(inputs)
    assert not placed.card.faults


def test_a_timed_step_has_a_span_for_every_task_and_op() -> None:
    plan = streamed_plan("clipped")
    placed = Placed("clipped", plan, timed=True)
    captured("clipped").train(placed.step)
    measured = placed.step.measured
    assert measured is not None
    names = {span.name for span in measured.spans}
    assert {task.name for task in plan.tasks} <= names
    assert len(measured.lane(Lane.DEVICE)) > 50
    assert all(span.end_s >= span.start_s >= 0 for span in measured.spans)


def test_a_home_that_does_not_fit_the_host_is_refused_with_its_size() -> None:
    step = captured("clipped")
    placed = Placed("clipped", plan_of("clipped", 0))
    placed.pool._available_bytes = lambda: 0
    large = torch.zeros(2**21)
    before = large.data_ptr()
    with pytest.raises(HostMemoryError, match=r"8\.0 MiB of pinned"):
        placed.device.bring_home([(large, Tier.HOST)])
    assert large.data_ptr() == before
    assert step is captured("clipped")


def test_a_pin_that_fails_leaves_no_error_for_the_next_kernel() -> None:
    placed = Placed("clipped", plan_of("clipped", 0))
    placed.card.pins_left = 0
    with pytest.raises(HostMemoryError, match=r"cannot pin 8\.0 KiB .*CUDA error 1"):
        placed.device.bring_home([(torch.zeros(2048), Tier.HOST)])
    placed.card._launch()
    placed.card.pins_left = -1
    assert not differences(captured("clipped").train(placed.step), reference("clipped"))


def test_a_thread_of_the_host_works_for_the_card_of_its_step() -> None:
    placed = Placed("clipped", host_plan("clipped"))
    captured("clipped").train(placed.step)
    names = {t.name for t in threading.enumerate() if t.ident in placed.card.bound}
    assert names == {"cotrain-host-0"}


def test_tensors_of_one_storage_move_once_and_still_share_it() -> None:
    placed = Placed("clipped", plan_of("clipped", 0))
    whole = torch.arange(24.0).reshape(4, 6)
    row, column = whole[1], whole.t()[2]
    placed.device.bring_home([(t, Tier.HOST) for t in (whole, row, column)])
    assert placed.pool.held_bytes == 96
    assert len({t.untyped_storage()._cdata for t in (whole, row, column)}) == 1
    whole[1, 2] = -1.0
    assert row[2] == -1.0
    assert column[1] == -1.0
    assert column.stride() == (6,)
    placed.device.bring_home([(t, Tier.DEVICE) for t in (whole, row, column)])
    assert not placed.pool.holds(whole)
    assert row[2] == whole[1, 2] == -1.0


def test_every_training_has_a_random_plan_with_tasks_here() -> None:
    """The tests above would pass without a copy."""
    names: Sequence[str] = [name for name in TRAININGS if name not in LONG_ONLY]
    counts = [len(plan_of(name, seed).tasks) for name in names for seed in range(3)]
    assert sum(count > 0 for count in counts) > len(counts) / 2
    assert isinstance(captured(names[0]), Captured)
