"""A copy or an update that never ends is named and given up, and nothing goes on beside it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from cotrain_compile.errors import StepFailed
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.in_flight import POLLS
from cotrain_compile.runtime.lanes import Task, WorkerLane
from tests.graph.runtime.test_cuda_runtime import Placed, streamed_plan
from tests.support.captured_steps import captured, differences
from tests.support.faults import SETTINGS, Trial, clones, compile_setting, undisturbed
from tests.support.thread_card import ThreadEvent

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")

LIMIT_S = 0.2


def fresh_trial(name: str) -> tuple[Trial, Any]:
    """A compiled step of its own: after a watchdog nobody else may use it."""
    compiled = compile_setting(name)
    compiled._device.watchdog_s = LIMIT_S
    training = SETTINGS[name].training
    return Trial(captured(training), compiled, clones(undisturbed(training)[0])), compiled


@contextmanager
def stuck(device: Any, number: int) -> Iterator[threading.Event]:
    """Within it, copy `number` of the step does not end; from then on it may."""
    copy, calls, let_go = device._copy, iter(range(1 << 30)), threading.Event()

    def copy_or_hang(*arguments: Any) -> None:
        if next(calls) == number:
            let_go.wait()
        copy(*arguments)

    with mock.patch.object(device, "_copy", copy_or_hang):
        try:
            yield let_go
        finally:
            let_go.set()


def never_end(name: str, number: int) -> None:
    trial, compiled = fresh_trial(name)
    transfers = [transfer.name for transfer in compiled.plan.transfers]
    with stuck(compiled._device, number % len(transfers)) as let_go:
        with pytest.raises(StepFailed, match=r"at work on lane (h2d|d2h) after 0.2 s") as failure:
            trial.take_step()
        (named,) = re.findall(r"failed: (\S+(?: and \d+ more)?) was still", str(failure.value))
        assert named.partition(" and ")[0] in transfers  # of a bundle the first
        assert "last checkpoint in a new process" in str(failure.value)
        left = clones(trial.inputs)
        # What had not begun never will, also when the copy goes on after all.
        let_go.set()
        for lane in compiled._device._lanes.values():
            lane.submit("all before it", lambda: None, ()).done.wait()
    changed = trial.changed_since(left)
    assert changed <= set(compiled.deferred.partial.left)
    assert len(changed) <= 1
    with pytest.raises(StepFailed, match=f"{named} of an earlier step never ended"):
        compiled(list(trial.inputs))


@pytest.mark.parametrize("number", [0, 5, -1])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_copy_that_never_ends_is_named(name: str, number: int) -> None:
    never_end(name, number)


def test_an_update_that_never_ends_is_named() -> None:
    trial, compiled = fresh_trial("host")
    let_go, update = threading.Event(), compiled.plan.host_updates[0].name
    kernel: HostKernel = compiled._device._kernels[update]

    def hang(inputs: Sequence[Any], meter: Any, course: Any) -> None:
        let_go.wait()
        kernel(inputs, meter, course)

    kernels = {**compiled._device._kernels, update: hang}
    with (
        mock.patch.object(compiled._device, "_kernels", kernels),
        pytest.raises(
            StepFailed, match=f"{update} failed: {update} was still at work on lane host"
        ),
    ):
        trial.take_step()
    let_go.set()


def test_a_slow_copy_is_no_stuck_one() -> None:
    trial, compiled = fresh_trial("streamed")
    with stuck(compiled._device, 1) as let_go:
        threading.Timer(LIMIT_S / 2, let_go.set).start()
        trial.take_step()
    assert not differences(trial.inputs, undisturbed("clipped")[1])


def test_without_a_watchdog_a_step_waits() -> None:
    trial, compiled = fresh_trial("streamed")
    compiled._device.watchdog_s = None
    with stuck(compiled._device, 1) as let_go:
        threading.Timer(2 * LIMIT_S, let_go.set).start()
        trial.take_step()
    assert not differences(trial.inputs, undisturbed("clipped")[1])


def test_one_late_look_at_a_task_is_not_enough() -> None:
    """As after SIGSTOP: the clock has gone on, the copy has not had its time."""
    compiled = compile_setting("streamed")
    device: Any = compiled._device
    device.watchdog_s = LIMIT_S
    task = Task("fetch.w", "h2d", lambda: None, ())
    task.started, task.start_s = True, -1e9
    device._tasks = {"fetch.w": task}
    looks = []

    def look(timeout: float) -> bool:
        looks.append(timeout)
        return len(looks) == POLLS

    with mock.patch.object(task, "done", mock.Mock(wait=look, is_set=lambda: False)):
        device.drain()
    assert device._given_up == ""


def test_a_task_given_up_before_it_begins_never_runs() -> None:
    gate, ran = threading.Event(), []
    lane = WorkerLane("h2d")
    first = lane.submit("first", gate.wait, ())
    second = lane.submit("second", lambda: ran.append(torch.ones(1)), ())
    second.give_up(TimeoutError("too late"))
    gate.set()
    lane.submit("third", lambda: None, ()).done.wait()
    assert first.ran
    assert not ran
    assert not second.broke_off


# On a card, where a copy has been issued long before it is done.


def ends_of_copies() -> int:
    """How many ends of copies a step records: those that are given together share one."""
    placed = Placed("clipped", streamed_plan("clipped"))
    with mock.patch.object(placed.card, "record", wraps=placed.card.record) as record:
        placed.step(clones(captured("clipped").inputs))
    return sum(call.args[0] is not None for call in record.call_args_list)


def test_a_copy_that_a_card_never_does_is_named_where_the_step_ends() -> None:
    copied = ends_of_copies()
    placed = Placed("clipped", streamed_plan("clipped"))
    device = placed.device
    device.watchdog_s = LIMIT_S
    training = captured("clipped")
    record, hold = placed.card.record, placed.card.hold
    events: list[ThreadEvent] = []

    def record_but_the_last(stream: Any, *, timed: bool = False) -> ThreadEvent:
        event = record(stream, timed=timed)
        if stream is not None:
            events.append(event)
            if len(events) == copied:
                return ThreadEvent()  # never comes
        return event

    def hold_without_blocking(stream: Any, event: Any) -> None:
        if stream is not None or event.query():
            hold(stream, event)

    inputs = clones(training.inputs)
    with (
        mock.patch.object(placed.card, "record", record_but_the_last),
        mock.patch.object(placed.card, "hold", hold_without_blocking),
        pytest.raises(StepFailed, match=r"failed: the card had not done this copy 0.2 s after"),
    ):
        placed.step(list(inputs))
    with pytest.raises(StepFailed, match="of an earlier step never ended"):
        placed.step(list(inputs))
