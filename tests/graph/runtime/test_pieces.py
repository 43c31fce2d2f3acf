"""Large parameters in pieces: copy, update and way back overlap, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import Link, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import fraction
from cotrain_compile.placement.schedule import bundles
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Lane as LaneName
from cotrain_compile.plan import Plan, Transfer
from cotrain_compile.presets import find
from cotrain_compile.runtime.course import Course, Piecewise
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host import pieces
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.lanes import WorkerLane
from tests.support.captured_steps import captured
from tests.support.faults import LINK_IS_DOWN, failing_call
from tests.support.held_back import PATIENCE_S
from tests.support.thread_card import ThreadCard

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")

TRAININGS = ("clipped", "unclipped", "autocast-unclipped")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 256)
    # What is in pieces is large, and never in a bundle.
    monkeypatch.setattr(bundles, "FEWEST", 1 << 30)


def host_plan(name: str) -> Plan:
    problem = captured(name).problem()
    return schedule(problem, fraction(problem.dataflow, 1.0))


class Placed:
    """A captured step with all updates on the host, by fused kernels; cut, or not."""

    def __init__(self, name: str, kind: str = "emulated", *, cut: bool = True) -> None:
        step, self.plan = captured(name), host_plan(name)
        graph = run_passes(step.step, self.plan)
        kernels = host_kernels(graph, "fused")
        self.piecewise = pieces.piecewise_tasks(graph, kernels) if cut else {}
        self.card = ThreadCard()
        self.device = self._device(kind, kernels)
        self.step = CompiledStep(step.problem(), self.plan, graph, self.device)

    def _device(self, kind: str, kernels: Mapping[str, HostKernel]) -> Device:
        if kind == "emulated":
            slow = Link(1e6, latency_s=1e-4)
            machine = find("this-machine").but(d2h=slow, h2d=slow)
            return EmulatedDevice(
                machine, self.plan.budgets, kernels, self.piecewise, throttle=True
            )
        pool = PinnedPool(self.card.pin, self.card.unpin, lambda: 1 << 40)
        return CudaDevice(self.card, pool, 1 << 40, kernels, self.piecewise)


@pytest.mark.parametrize("name", TRAININGS)
def test_copy_update_and_way_back_of_a_large_parameter_follow_one_another(name: str) -> None:
    placed = Placed(name)
    updates = {
        task.name: task for task in placed.plan.host_updates if task.name in placed.piecewise
    }
    assert updates
    ways_back = [t for t in placed.plan.transfers if t.after and t.after[0] in updates]
    assert len(ways_back) == len(updates)
    for back in ways_back:
        (update,) = back.after
        assert placed.piecewise[back.name].follows == update
        copy = placed.piecewise[update].follows
        assert copy in updates[update].after
        assert placed.piecewise[copy] == replace(placed.piecewise[back.name], follows="")


@pytest.mark.parametrize("kind", ["emulated", "cuda"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_step_in_pieces_leaves_what_the_whole_one_does(name: str, kind: str) -> None:
    whole, placed = Placed(name, kind, cut=False), Placed(name, kind)
    expected, left = captured(name).train(whole.step), captured(name).train(placed.step)
    torch.testing.assert_close(left, expected, rtol=1e-6, atol=1e-8)
    assert not placed.card.faults
    assert whole.step.measured is not None
    assert placed.step.measured is not None
    peak_bytes = placed.step.measured.peak_bytes[Tier.DEVICE]
    assert peak_bytes == whole.step.measured.peak_bytes[Tier.DEVICE]


def test_a_piece_that_is_not_waited_for_shows() -> None:
    placed = Placed("unclipped")
    with mock.patch.object(Course, "wait_for_the_one_ahead", return_value=None):
        left = captured("unclipped").train(placed.step)
    assert any(value.isnan().any() for value in left if isinstance(value, Tensor))


def test_small_and_gapped_parameters_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 24)
    assert not Placed("clipped").piecewise
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4)
    rows = torch.zeros(6, 8)
    assert pieces._piecewise(rows) == Piecewise(rows=1, row_elements=8, count=6)
    for odd in (rows.t(), rows[:, :4], rows[:3], torch.zeros(()), torch.zeros(0, 3)):
        assert pieces._piecewise(odd) is None


def parts_of_the_link(placed: Placed) -> list[Transfer]:
    """The copies that are cut, down before up."""
    cut = [task for task in placed.plan.transfers if task.name in placed.piecewise]
    return sorted(cut, key=lambda task: task.direction != "offload")


@pytest.mark.parametrize("direction", ["offload", "prefetch"])
def test_what_was_begun_when_a_piece_fails_is_named(direction: str) -> None:
    step, placed = captured("unclipped"), Placed("unclipped")
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in step.inputs]
    device: Any = placed.device
    lane = LaneName.D2H if direction == "offload" else LaneName.H2D
    fail = failing_call(lambda *_: None, 1)
    copy = device._copy

    def copy_or_fail(on: str, to: Tensor, source: Tensor, ready_s: float) -> None:
        if on == lane and 128 < source.nbytes <= 256:  # no whole tensor of this step
            fail()
        copy(on, to, source, ready_s)

    with (
        mock.patch.object(device, "_copy", copy_or_fail),
        pytest.raises(StepFailed, match=LINK_IS_DOWN) as failure,
    ):
        placed.step(inputs)
    said = str(failure.value)
    first = said.partition(" failed: ")[0]
    assert first in {task.name for task in parts_of_the_link(placed)}
    assert said.count(LINK_IS_DOWN) == 1
    # Whatever had begun by then is named.
    changed = {
        item.name
        for item, now, before in zip(step.step.inputs, inputs, step.inputs, strict=True)
        if isinstance(now, Tensor) and not torch.equal(now, before)
    }
    assert changed <= set(placed.step.deferred.partial.left)


@pytest.fixture
def lanes() -> tuple[WorkerLane, WorkerLane]:
    return WorkerLane("down"), WorkerLane("up")


def test_a_follower_works_while_what_it_follows_goes_on(
    lanes: tuple[WorkerLane, WorkerLane],
) -> None:
    down, up = lanes
    how = Piecewise(rows=1, row_elements=1, count=3)
    ahead = Course(how)
    behind = Course(replace(how, follows="first"), ahead)
    seen = [threading.Event() for _ in range(how.count)]

    def lead() -> None:
        for number in ahead.pieces():
            # The piece before has been worked on, before this one is done.
            assert number == 0 or seen[number - 1].wait(PATIENCE_S)

    def follow() -> None:
        for number in behind.pieces():
            seen[number].set()

    first = down.submit("first", lead, (), ahead)
    second = up.submit("second", follow, (), behind)
    assert second.done.wait(PATIENCE_S)
    assert first.done.wait(PATIENCE_S)
    assert first.ran
    assert second.ran


def test_one_that_follows_a_failure_has_not_begun(lanes: tuple[WorkerLane, WorkerLane]) -> None:
    down, up = lanes
    how = Piecewise(rows=1, row_elements=1, count=2)
    ahead = Course(how)

    def fail() -> None:
        raise RuntimeError(LINK_IS_DOWN)

    first = down.submit("first", fail, (), ahead)
    second = up.submit("second", lambda: None, (), Course(how, ahead))
    assert second.done.wait(PATIENCE_S)
    assert second.error is first.error
    assert first.broke_off
    assert not second.broke_off


def test_what_a_task_waits_between_its_pieces_is_not_what_it_takes(
    lanes: tuple[WorkerLane, WorkerLane],
) -> None:
    down, up = lanes
    how = Piecewise(rows=1, row_elements=1, count=2)
    ahead = Course(how)
    behind = Course(how, ahead)
    gate = threading.Event()

    def lead() -> None:
        for number in ahead.pieces():
            assert number == 0 or gate.wait(PATIENCE_S)

    def follow() -> None:
        for _ in behind.pieces():
            gate.set()

    down.submit("first", lead, (), ahead)
    second = up.submit("second", follow, (), behind)
    assert second.done.wait(PATIENCE_S)
    span = second.span(0.0, second.end_s)
    assert span is not None
    assert span.end_s - span.start_s == pytest.approx(
        second.end_s - second.start_s - behind.waited_s, abs=1e-9
    )
    assert behind.waited_s > 0
