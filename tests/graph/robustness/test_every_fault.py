"""A fault at every place of a step, one after the other: allocations, nodes, threads.

Few places in every run, all of them in a long one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from torch import fx

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import OutOfDeviceMemory, StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.lanes import WorkerLane
from tests.support.captured_steps import differences
from tests.support.faults import (
    SETTINGS,
    Trial,
    before_node,
    check_left,
    compile_setting,
    compiled_setting,
    trial_of,
    undisturbed,
)

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")

EVERY = [
    *(pytest.param(name, 12, id=name) for name in SETTINGS),
    *(pytest.param(name, None, id=f"{name}-all", marks=pytest.mark.long) for name in SETTINGS),
]


def some(count: int, most: int | None) -> list[int]:
    """Numbers below `count`: all, or about `most` of them, at even distances."""
    return list(range(0, count, max(1, count // most) if most else 1))


class Allocations:
    """Counts what a meter is asked to count, and fails at one of them."""

    def __init__(self, compiled: CompiledStep, fails_at: int = -1) -> None:
        self.meter: Any = compiled._device.meter
        self.fails_at = fails_at
        self.calls = 0
        self.lock = threading.Lock()

    def patched(self) -> AbstractContextManager[object]:
        count = self.meter.count

        def count_or_fail(storage: Any, tier: Tier, where: str, nbytes: int) -> None:
            with self.lock:
                self.calls, number = self.calls + 1, self.calls
            if number == self.fails_at:
                raise OutOfDeviceMemory(f"out of memory on the {tier} at {where}", tier=tier)
            count(storage, tier, where, nbytes)

        return mock.patch.object(self.meter, "count", count_or_fail)


def step_with(trial: Trial, fault: AbstractContextManager[object]) -> Exception | None:
    with fault:
        try:
            trial.take_step()
        except Exception as error:
            return error
    return None


def allocations(name: str) -> int:
    """How many allocations a step makes."""
    trial, compiled = trial_of(name)
    counted = Allocations(compiled)
    assert step_with(trial, counted.patched()) is None
    return counted.calls


def run_out_of_memory(name: str, number: int) -> None:
    trial, compiled = trial_of(name)
    failure = step_with(trial, Allocations(compiled, fails_at=number).patched())
    assert isinstance(failure, OutOfDeviceMemory | StepFailed), (number, failure)
    assert "out of memory on the" in str(failure)
    check_left(trial, compiled, name, failure)


@pytest.mark.parametrize(("name", "most"), EVERY)
def test_out_of_memory_at_every_allocation(name: str, most: int | None) -> None:
    for number in some(allocations(name), most):
        run_out_of_memory(name, number)


def no_memory() -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def nodes_that_run(compiled: CompiledStep) -> list[fx.Node]:
    return [node for node in compiled.graph.nodes if node.op == "call_function"]


def fail_at_node(name: str, number: int) -> None:
    trial, compiled = trial_of(name)
    node = nodes_that_run(compiled)[number]
    failure = step_with(trial, before_node(compiled, node, no_memory))
    assert isinstance(failure, RuntimeError), node
    assert "can't allocate memory" in str(failure)
    check_left(trial, compiled, name, failure)


@pytest.mark.parametrize(("name", "most"), EVERY)
def test_an_exception_at_every_node(name: str, most: int | None) -> None:
    for number in some(len(nodes_that_run(compiled_setting(name))), most):
        fail_at_node(name, number)


# Threads that die.


def threads_of(lane: WorkerLane) -> Iterator[threading.Thread]:
    for thread in threading.enumerate():
        if getattr(thread, "_args", ()) and lane._queue in thread._args:  # type: ignore[attr-defined]
            yield thread


def kill(thread: threading.Thread) -> None:
    """As a debugger or a library may do: an exception from outside, that nobody catches."""
    assert thread.ident is not None
    ident, error = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error) == 1


def killed_in(work: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`work`, whose thread is killed in one of its calls."""
    calls = itertools.count()

    def call(*arguments: Any) -> Any:
        if next(calls) == number:
            kill(threading.current_thread())
        return work(*arguments)

    return call


def kill_worker_at(name: str, number: int) -> None:
    trial, compiled = trial_of(name)
    device: Any = compiled._device
    copy = killed_in(device._copy, number)
    failure = step_with(trial, mock.patch.object(device, "_copy", copy))
    assert isinstance(failure, StepFailed)
    check_left(trial, compiled, name, failure)


@pytest.mark.parametrize("name", ["host", "all"])
def test_a_worker_killed_at_work_fails_the_step_and_is_replaced(name: str) -> None:
    for number in range(3):
        kill_worker_at(name, number)


@pytest.mark.parametrize("name", ["host", "all"])
def test_an_idle_worker_that_dies_loses_no_task(name: str) -> None:
    compiled = compile_setting(name)
    trial = Trial(trial_of(name)[0].step, compiled, list(trial_of(name)[0].inputs))
    lanes = list(compiled._device._lanes.values())
    for lane in lanes:
        for thread in list(threads_of(lane)):
            kill(thread)
    failure = step_with(trial, contextlib.nullcontext())
    for _ in range(len(lanes)):  # each finds out when it is given something to do
        if failure is None:
            break
        assert isinstance(failure, StepFailed)
        trial.load(undisturbed(SETTINGS[name].training)[0])
        failure = step_with(trial, contextlib.nullcontext())
    assert failure is None
    assert not differences(trial.inputs, undisturbed(SETTINGS[name].training)[1])
    assert all(any(thread.is_alive() for thread in threads_of(lane)) for lane in lanes)
