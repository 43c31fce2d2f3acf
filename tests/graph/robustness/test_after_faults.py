"""What is no fault of the step goes through; after one, nothing leaks and a checkpoint goes on."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Phase
from cotrain_compile.entry import compiled as compiled_steps
from cotrain_compile.errors import OutOfDeviceMemory, StepFailed
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.schedule import bundles
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.runtime.meter import MemoryMeter
from tests.support.captured_steps import captured, place
from tests.support.faults import (
    LINK_IS_DOWN,
    NOTHING_CHANGED,
    SETTINGS,
    before_node,
    check_left,
    clones,
    compile_setting,
    compiled_setting,
    failing_call,
    ops_of,
    restored_budgets,
    trial_of,
    undisturbed,
)
from tests.support.steps import CASES, OPTIMIZERS, Step, all_tensors, cotrain, make_step, vectors

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")

# What is no fault of the step.


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradients_go_through_as_in_eager(name: str, bad: float) -> None:
    step = captured(SETTINGS[name].training)
    (x, y), *_ = step.batches
    # Only what the bad feature of the batch meets turns bad at once.
    poisoned = replace(step, batches=((x.index_fill(1, torch.tensor([0]), bad), y),) * 2)
    left = poisoned.train(compiled_setting(name))
    expected = poisoned.train(lambda inputs: step.step.module(*inputs))
    assert any(value.isnan().any() for value in expected if isinstance(value, Tensor))
    for found, wanted in zip(left, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_users_own_mistake_keeps_its_type_and_shows_its_line() -> None:
    trial, compiled = trial_of("host")
    (x, y), *_ = trial.step.batches
    wrong = replace(trial, step=replace(trial.step, batches=((x, y + 100),)))
    with pytest.raises(IndexError) as failure:
        wrong.take_step()
    assert re.fullmatch(r"Target \d+ is out of bounds\.", str(failure.value))
    assert "F.cross_entropy(model(x), y)" in "\n".join(failure.value.__notes__)
    check_left(trial, compiled, "host", failure.value)


def test_statistics_that_the_forward_has_updated_are_named() -> None:
    step = captured("conv")
    compiled = place("conv", schedule(step.problem(), resident(step.dataflow)))
    inputs = clones(step.inputs)
    node = ops_of(Phase.BACKWARD)(compiled)[0]

    def interrupt() -> None:
        raise KeyboardInterrupt

    with before_node(compiled, node, interrupt), pytest.raises(KeyboardInterrupt) as failure:
        compiled(inputs)
    (note,) = failure.value.__notes__
    assert note.startswith(NOTHING_CHANGED)
    assert "norm.running_mean" in note


@pytest.mark.parametrize("name", SETTINGS)
def test_inputs_too_large_for_the_device_are_no_update(name: str) -> None:
    trial, compiled = trial_of(name)
    meter = compiled._device.meter
    with restored_budgets(meter):
        meter.budgets = dict.fromkeys(MEMORIES, 0)
        with pytest.raises(OutOfDeviceMemory) as failure:
            trial.take_step()
    assert not trial.changed_since(undisturbed(SETTINGS[name].training)[0])
    check_left(trial, compiled, name, failure.value)


# The same through torch.compile.


def train_through_a_checkpoint(fault: Callable[[Step], None]) -> dict[str, Tensor]:
    """A step, perhaps with a fault in the next one, and a step from the checkpoint in between."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    case, batch = CASES["mlp"], vectors()
    model = case.make_model()
    optimizers = OPTIMIZERS["adamw"](model)
    step = cotrain(policy="fraction:1")(make_step(model, optimizers, case.loss_of))
    # The last copy that is one task alone: of a bundle all are, and fail, together.
    with mock.patch.object(bundles, "FEWEST", 1 << 30):
        step(*batch)
    checkpoint = copy.deepcopy((model.state_dict(), optimizers[0].state_dict()))
    fault(lambda: step(*batch))
    model.load_state_dict(checkpoint[0])
    optimizers[0].load_state_dict(checkpoint[1])
    torch.manual_seed(1)
    step(*batch)
    return all_tensors(model, optimizers)


def test_after_a_partial_step_a_loaded_checkpoint_goes_on() -> None:
    def tear(step: Step) -> None:
        compiled = last_compiled()
        device: Any = compiled._device
        last_copy = failing_call(device._copy, len(compiled.plan.transfers) - 1)
        with (
            mock.patch.object(device, "_copy", last_copy),
            pytest.raises(StepFailed, match=r"tensors are one step ahead .* may be half written"),
        ):
            step()
        for _ in range(2):
            with pytest.raises(StepFailed, match="an earlier step failed"):
                step()

    partial = train_through_a_checkpoint(tear)
    torch.testing.assert_close(
        partial, train_through_a_checkpoint(lambda step: None), rtol=0, atol=0
    )


def last_compiled() -> CompiledStep:
    newest = compiled_steps.newest()
    assert newest is not None
    return newest


# No faults, no leaks.


def threads_of_lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("cotrain-")}


def test_the_threads_of_a_step_that_failed_end_with_it() -> None:
    trial = trial_of("all")[0]
    gc.collect()
    before = threads_of_lanes()
    trial = replace(trial, run=(compiled := compile_setting("all")))
    own = threads_of_lanes() - before
    assert len(own) >= 3
    with (
        mock.patch.object(compiled._device, "_copy", failing_call(lambda *_: None, 0)),
        pytest.raises(StepFailed, match=LINK_IS_DOWN),
    ):
        trial.take_step()
    del compiled, trial
    gc.collect()
    for thread in own:
        thread.join(timeout=10)
    assert not own & threads_of_lanes()


def live_storages() -> int:
    gc.collect()
    # By type: some objects of torch's warn when they are asked for their class.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return len({tensor.untyped_storage()._cdata for tensor in tensors})


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_two_hundred_steps_of_all_modes_leak_nothing() -> None:
    trial, compiled = trial_of("all")
    meter = compiled._device.meter

    def alive_after(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            trial.take_step()
        return live_storages(), len(meter._storages)

    begin, begin_bytes = alive_after(10), resident_bytes()
    assert alive_after(100) == begin
    assert alive_after(100) == begin
    assert resident_bytes() - begin_bytes < 32 << 20


def test_a_failed_step_frees_its_tensors_at_once() -> None:
    trial, compiled = trial_of("activations")
    copied: list[weakref.ref[Tensor]] = []

    def fail(lane: str, destination: Tensor, source: Tensor, ready_s: float) -> None:
        copied.append(weakref.ref(destination))
        raise RuntimeError(LINK_IS_DOWN)

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(compiled._device, "_copy", fail), contextlib.suppress(StepFailed):
            trial.take_step()
        assert copied
        assert not any(ref() is not None for ref in copied)
    finally:
        gc.enable()


def test_steps_that_fail_leak_nothing() -> None:
    trial, compiled = trial_of("activations")
    device: Any = compiled._device

    def alive_after(steps: int) -> int:
        for _ in range(steps):
            with (
                mock.patch.object(device, "_copy", failing_call(device._copy, 1)),
                pytest.raises(StepFailed, match=LINK_IS_DOWN),
            ):
                trial.take_step()
        return live_storages()

    assert alive_after(2) == alive_after(20)


def test_no_function_of_pythons_runs_when_a_tensor_dies() -> None:
    """A Ctrl-C that comes in one is lost, and what it was to count stays counted."""
    meter = MemoryMeter(dict.fromkeys(MEMORIES, 1 << 20))
    tensor = torch.ones(8)
    meter.track(tensor, Tier.DEVICE, "here")
    (counted,) = meter._storages.values()
    assert isinstance(counted.__callback__, types.BuiltinFunctionType)
    assert meter.used_bytes[Tier.DEVICE] == tensor.nbytes
    del tensor
    assert meter.used_bytes[Tier.DEVICE] == 0
