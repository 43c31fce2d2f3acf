"""A step that fails says once what it leaves, stops cleanly, and the next step is right or refused.

Faults are let into a copy, a host update, an allocation; Ctrl-C comes anywhere.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from cotrain_compile.dataflow import Phase
from cotrain_compile.errors import OutOfDeviceMemory, StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Transfer, carried_out
from cotrain_compile.runtime.meter import MemoryMeter
from tests.support.captured_steps import differences
from tests.support.faults import (
    LINK_IS_DOWN,
    SETTINGS,
    before_node,
    check_left,
    compiled_setting,
    failing_call,
    nodes_everywhere,
    ops_of,
    parts,
    restored_budgets,
    trial_of,
    undisturbed,
)

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")


def copies_of(name: str) -> int:
    return len(compiled_setting(name).plan.transfers)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_copy_that_fails_reaches_the_user_once(name: str) -> None:
    for number in parts(copies_of(name)):
        trial, compiled = trial_of(name)
        device: Any = compiled._device
        with (
            mock.patch.object(device, "_copy", failing_call(device._copy, number)),
            pytest.raises(StepFailed, match=LINK_IS_DOWN) as failure,
        ):
            trial.take_step()
        broken_off = str(failure.value).partition(f" failed: {LINK_IS_DOWN}")[0]
        assert broken_off in {
            f"{unit[0].name} and {len(unit) - 1} more" if len(unit) > 1 else unit[0].name
            for unit in carried_out(compiled.plan.tasks)
            if isinstance(unit[0], Transfer)
        }
        assert str(failure.value).count(LINK_IS_DOWN) == 1
        check_left(trial, compiled, name, failure.value)


def half_an_update(inputs: Sequence[Any], *_: object) -> None:
    for value in inputs:
        if isinstance(value, Tensor) and value.is_floating_point():
            value.add_(1)
    raise RuntimeError("the worker is ill")


@pytest.mark.parametrize("name", ["host", "host streamed", "all"])
def test_an_update_that_fails_in_its_worker_names_what_may_be_half_written(name: str) -> None:
    updates = [region.name for region in compiled_setting(name).plan.host_updates]
    for number in parts(len(updates)):
        trial, compiled = trial_of(name)
        device: Any = compiled._device
        kernels = {**device._kernels, updates[number]: half_an_update}
        with (
            mock.patch.object(device, "_kernels", kernels),
            pytest.raises(StepFailed, match=f"{updates[number]} failed: the worker is") as failure,
        ):
            trial.take_step()
        assert "may be half written" in str(failure.value)
        assert updates[number].removeprefix("update.") in str(failure.value)
        check_left(trial, compiled, name, failure.value)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tier", Tier)
def test_out_of_memory_anywhere(name: str, tier: Tier) -> None:
    for node in nodes_everywhere(compiled_setting(name)):
        trial, compiled = trial_of(name)
        meter = compiled._device.meter

        def use_up(meter: MemoryMeter = meter) -> None:
            meter.budgets = {**meter.budgets, tier: 0}

        failure = None
        with restored_budgets(meter), before_node(compiled, node, use_up):
            try:
                trial.take_step()
            except (OutOfDeviceMemory, StepFailed) as error:
                failure = error
        if failure is None:  # nothing was asked of that tier any more
            assert not differences(trial.inputs, undisturbed(SETTINGS[name].training)[1])
        else:
            assert f"out of memory on the {tier}" in str(failure)
            check_left(trial, compiled, name, failure)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_interrupt_raised_in_the_device_thread(name: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for node in nodes_everywhere(compiled_setting(name)):
        trial, compiled = trial_of(name)
        with before_node(compiled, node, interrupt), pytest.raises(KeyboardInterrupt) as failure:
            trial.take_step()
        check_left(trial, compiled, name, failure.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_ctrl_c_stops_before_the_first_update_or_after_the_last(name: str) -> None:
    for node in nodes_everywhere(compiled_setting(name)):
        trial, compiled = trial_of(name)
        press = functools.partial(os.kill, os.getpid(), signal.SIGINT)
        steps = compiled.steps
        with before_node(compiled, node, press), pytest.raises(KeyboardInterrupt) as failure:
            trial.take_step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if compiled.steps == steps:
            assert not trial.changed_since(undisturbed(SETTINGS[name].training)[0])
            check_left(trial, compiled, name, failure.value)
        else:
            assert "The step was finished first" in failure.value.__notes__[0]
            assert not differences(trial.inputs, undisturbed(SETTINGS[name].training)[1])


def test_a_second_ctrl_c_while_work_in_flight_ends_changes_nothing() -> None:
    trial, compiled = trial_of("streamed")
    drain = compiled._device.drain

    def press_again() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        drain()

    def interrupt() -> None:
        raise KeyboardInterrupt

    node = ops_of(Phase.BACKWARD)(compiled)[-1]
    with (
        mock.patch.object(compiled._device, "drain", press_again),
        before_node(compiled, node, interrupt),
        pytest.raises(KeyboardInterrupt) as failure,
    ):
        trial.take_step()
    check_left(trial, compiled, "streamed", failure.value)
