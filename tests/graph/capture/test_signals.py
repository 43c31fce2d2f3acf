"""Signals at random times: a handler finds the state before a step or after it, never between."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.dataflow import Phase
from cotrain_compile.runtime.lanes import Task, WorkerLane
from cotrain_compile.runtime.process.signals import HELD, HeldSignals
from tests.support.captured_steps import differences
from tests.support.faults import (
    SETTINGS,
    Trial,
    before_node,
    check_left,
    clones,
    compiled_setting,
    ops_of,
    trial_of,
    undisturbed,
)

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")

TRIES = [
    *(pytest.param(name, 5, id=name) for name in SETTINGS),
    *(pytest.param(name, 200, id=f"{name}-long", marks=pytest.mark.long) for name in SETTINGS),
]


@contextmanager
def signalled(number: int, after_s: float) -> Iterator[None]:
    """Within it, this process gets a signal after `after_s`; it has come when this ends."""
    sent = sender().submit(send, number, after_s)
    try:
        yield
    finally:
        sent.result()


@functools.cache
def sender() -> ThreadPoolExecutor:
    """One thread for all signals: when a thread ends, Python swallows an interrupt at times."""
    return ThreadPoolExecutor(1)


def send(number: int, after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), number)


@contextmanager
def handled_by(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def seconds_of_a_step(name: str) -> float:
    trial = trial_of(name)[0]
    began = time.perf_counter()
    trial.take_step()
    return time.perf_counter() - began


def interrupted(trial: Trial, after_s: float) -> KeyboardInterrupt | None:
    """What a Ctrl-C raises; None where it came in a finalizer, in which Python drops exceptions."""
    dropped: list[object] = []
    try:
        with (
            mock.patch.object(sys, "unraisablehook", lambda args: dropped.append(args.exc_type)),
            signalled(signal.SIGINT, after_s),
        ):
            trial.take_step()
    except KeyboardInterrupt as interrupt:
        return interrupt
    assert dropped == [KeyboardInterrupt]
    return None


def press_ctrl_c(name: str, after_s: float) -> None:
    """A whole step or none, or a refusal to go on from what an exception has left partial."""
    first, second = undisturbed(SETTINGS[name].training)
    trial, compiled = trial_of(name)
    steps = compiled.steps
    interrupt = interrupted(trial, after_s)
    if interrupt is None or compiled.steps > steps:
        assert not differences(trial.inputs, second)
    elif getattr(interrupt, "__notes__", []):
        check_left(trial, compiled, name, interrupt)
    else:  # before the step began
        assert not trial.changed_since(first)


def save_in_handler(name: str, number: int, after_s: float) -> None:
    states = undisturbed(SETTINGS[name].training)
    trial, _ = trial_of(name)
    saved: list[list[Any]] = []

    def save(number: int, frame: FrameType | None) -> None:
        saved.append(clones(trial.inputs))

    with handled_by(number, save), signalled(number, after_s):
        trial.take_step()
    (found,) = saved
    assert not trial.changed_since(states[1])
    assert not trial.changed_since(found) or not changed_between(trial, found, states[0])


def changed_between(trial: Trial, one: list[Any], other: list[Any]) -> set[str]:
    return Trial(trial.step, trial.run, one).changed_since(other)


@pytest.mark.parametrize(("name", "tries"), TRIES)
def test_ctrl_c_at_a_random_time_leaves_a_whole_step_or_none(name: str, tries: int) -> None:
    rng, most_s = random.Random(name), 1.2 * seconds_of_a_step(name)
    for _ in range(tries):
        press_ctrl_c(name, rng.random() * most_s)


def test_ctrl_c_while_a_task_is_handed_over_leaves_nothing_to_wait_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came between the list of what is held and the queue: the step waited for ever."""
    hand_over = WorkerLane.hand_over
    trial, compiled = trial_of("all")

    def interrupted_once(lane: WorkerLane, tasks: Sequence[Task]) -> None:
        monkeypatch.setattr(WorkerLane, "hand_over", hand_over)
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerLane, "hand_over", interrupted_once)
    with pytest.raises(KeyboardInterrupt) as raised:
        trial.take_step()
    check_left(trial, compiled, "all", raised.value)


@pytest.mark.parametrize(("name", "tries"), TRIES)
def test_a_handler_that_saves_finds_a_whole_step(name: str, tries: int) -> None:
    rng, most_s = random.Random(name), 1.2 * seconds_of_a_step(name)
    for _ in range(tries):
        save_in_handler(name, rng.choice(HELD), rng.random() * most_s)


def test_a_handler_of_the_programs_own_is_called_in_place_of_an_interrupt() -> None:
    """A loop that ends on Ctrl-C when its step is done sets a flag, and no exception comes."""
    trial, compiled = trial_of("host")
    called = []
    node = ops_of(Phase.OPTIMIZER)(compiled)[-1]
    with (
        handled_by(signal.SIGINT, lambda number, frame: called.append(number)),
        before_node(compiled, node, lambda: os.kill(os.getpid(), signal.SIGINT)),
    ):
        trial.take_step()
    assert called == [signal.SIGINT]
    assert not differences(trial.inputs, undisturbed("clipped")[1])


def test_a_handler_finds_running_statistics_and_parameters_of_one_step() -> None:
    """A norm's statistics are written in the forward; the signal comes before the backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled, x = cotrain_compile.compile(step, quiet=True), torch.randn(8, 4)
    compiled(x)
    placed = cotrain_compile.inspect(compiled)
    saved: list[list[Any]] = []

    def save(number: int, frame: FrameType | None) -> None:
        saved.append(clones(list(model.state_dict().values())))

    with (
        handled_by(signal.SIGTERM, save),
        before_node(
            placed, ops_of(Phase.BACKWARD)(placed)[0], lambda: signal.raise_signal(signal.SIGTERM)
        ),
    ):
        compiled(x)
    (found,) = saved
    assert not differences(found, list(model.state_dict().values()))


def test_every_held_signal_is_handed_on_also_where_a_handler_raises() -> None:
    called: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        called.append(number)
        raise SystemExit(number)

    def note(number: int, frame: FrameType | None) -> None:
        called.append(number)

    held = HeldSignals()
    with handled_by(signal.SIGTERM, stop), handled_by(signal.SIGUSR1, note):
        held.hold()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        assert called == []
        with pytest.raises(SystemExit):
            held.release()
        assert signal.getsignal(signal.SIGTERM) is stop
    assert called == [signal.SIGTERM, signal.SIGUSR1]


def test_what_ends_the_process_by_itself_is_left_alone() -> None:
    held = HeldSignals()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    held.hold()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    held.release()


@pytest.mark.parametrize("work", ["hold", "release"])
def test_an_interrupt_between_any_two_lines_costs_no_signal(work: str) -> None:
    """SIGTERM has come; then Ctrl-C comes before the first, second, ... line of holding it back."""
    at = 0
    while True:
        at += 1
        held, terminated = HeldSignals(), list[int]()
        with handled_by(signal.SIGTERM, partial(note_in, terminated)):
            handlers = {number: signal.getsignal(number) for number in HELD}
            if work == "release":
                held.hold()
                signal.raise_signal(signal.SIGTERM)
            lines, interrupts = lines_until_interrupt(getattr(held, work), at)
            interrupts += whether_interrupted(held.release)
            if lines < at:
                break
            assert interrupts == 1
            assert len(terminated) == (work == "release")
            signal.raise_signal(signal.SIGTERM)
            assert len(terminated) == 1 + (work == "release")
            held.hold()
            held.release()
            assert {number: signal.getsignal(number) for number in HELD} == handlers
    assert at > 10


def note_in(seen: list[int], number: int, frame: FrameType | None) -> None:
    seen.append(number)


def lines_until_interrupt(call: Callable[[], None], number: int) -> tuple[int, int]:
    """How many lines of the module `call` has run, and interrupts raised; one comes at `number`."""
    lines = 0

    def at_line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != HeldSignals.hold.__code__.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                signal.raise_signal(signal.SIGINT)
        return at_line

    traced_before = sys.gettrace()
    sys.settrace(at_line)
    try:
        interrupts = whether_interrupted(call)
    finally:
        sys.settrace(traced_before)
    return lines, interrupts


def whether_interrupted(call: Callable[[], None]) -> int:
    try:
        call()
    except KeyboardInterrupt:
        return 1
    return 0


def test_off_the_main_thread_nothing_is_held() -> None:
    compiled_setting("host")
    before = signal.getsignal(signal.SIGINT)
    held = HeldSignals()
    thread = threading.Thread(target=held.hold)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
