"""Who waits for what an overlapping step has left to do, and what is said when that fails."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.backends.lifecycle.deferred import DeferredWork
from cotrain_compile.entry.choose_plan import saved_plan
from cotrain_compile.errors import PlanError, StepFailed
from cotrain_compile.options import Options
from tests.support.held_back import (
    PATIENCE_S,
    Training,
    failing,
    held_back,
    make_training,
    run_steps,
    with_kernels,
)
from tests.support.steps import vectors

FIRST = "update.0.weight"
READERS: dict[str, Callable[[Training], Any]] = {
    "synchronize": lambda training: cotrain_compile.synchronize(),
    "model.state_dict": lambda training: training.model.state_dict(),
    "a part's state_dict": lambda training: training.model[0].state_dict(),  # type: ignore[index]
    "optimizer.state_dict": lambda training: training.optimizer.state_dict(),
    "model.load_state_dict": lambda training: training.model.load_state_dict({}, strict=False),
    "a forward": lambda training: training.model(vectors()[0]),
    "a part's forward": lambda training: training.model[0](vectors()[0]),  # type: ignore[index]
}


def test_who_looks_at_the_state_waits_for_the_tail(tmp_path: Path) -> None:
    training, expected = make_training(tmp_path), make_training(tmp_path, overlap=False)
    for one in (training, expected):
        run_steps(one, 2)
    for seed, (name, read) in enumerate(READERS.items()):
        with held_back(training.compiled) as gate:
            run_steps(training, 1, seed)
            assert training.compiled._device.is_busy
            with ThreadPoolExecutor(1) as thread:
                reading = thread.submit(read, training)
                assert not wait([reading], timeout=0.05).done, name
                gate.set()
                reading.result(PATIENCE_S)
        assert not training.compiled._device.is_busy, name
        run_steps(expected, 1, seed)
        torch.testing.assert_close(training.tensors(), expected.tensors(), rtol=0, atol=0)


def test_what_is_loaded_between_steps_counts(tmp_path: Path) -> None:
    """Model and optimizer go back to a checkpoint while what a later step defers is held back."""
    training, expected = make_training(tmp_path), make_training(tmp_path, overlap=False)
    for one in (training, expected):
        run_steps(one, 2)
        saved = copy.deepcopy((one.model.state_dict(), one.optimizer.state_dict()))
        if one is training:
            with held_back(one.compiled) as gate:
                run_steps(one, 1, seed=2)
                threading.Timer(0.05, gate.set).start()
                one.optimizer.load_state_dict(saved[1])
        else:
            run_steps(one, 1, seed=2)
            one.optimizer.load_state_dict(saved[1])
        one.model.load_state_dict(saved[0])
        run_steps(one, 2, seed=3)
    torch.testing.assert_close(training.tensors(), expected.tensors(), rtol=0, atol=0)


def test_every_state_dict_between_steps_is_that_of_steps_that_do_not_overlap(
    tmp_path: Path,
) -> None:
    training, expected = make_training(tmp_path), make_training(tmp_path, overlap=False)
    run_steps(expected, 1)
    run_steps(training, 1)
    assert not expected.model._state_dict_pre_hooks
    for seed in range(4):
        for one in (training, expected):
            run_steps(one, 2, seed)
        found = (training.model.state_dict(), training.optimizer.state_dict()["state"])
        wanted = (expected.model.state_dict(), expected.optimizer.state_dict()["state"])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_learning_rate_changed_in_place_is_for_the_next_step(tmp_path: Path) -> None:
    def run(overlap: bool) -> dict[str, torch.Tensor]:
        rate = torch.tensor(1e-2)
        training = make_training(tmp_path, overlap=overlap, lr=rate)
        run_steps(training, 1)
        with held_back(training.compiled) as gate:
            if not overlap:
                gate.set()
            run_steps(training, 1, seed=2)
            rate.fill_(1e-4)
            gate.set()
            run_steps(training, 1, seed=3)
        return training.tensors()

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_a_weight_is_swapped_for_another_once_its_updates_are_done(tmp_path: Path) -> None:
    def swapped(training: Training) -> torch.Tensor:
        weight = training.model[0].weight  # type: ignore[index]
        other, weight.grad = torch.nn.Parameter(torch.ones_like(weight)), None
        torch.utils.swap_tensors(weight, other)
        return other.detach()

    def run(overlap: bool) -> dict[str, torch.Tensor]:
        training = make_training(tmp_path, overlap=overlap)
        run_steps(training, 2)
        with held_back(training.compiled) if overlap else nullcontext():
            run_steps(training, 1, seed=2)
            if overlap:
                with pytest.raises(RuntimeError, match="Cannot swap"):
                    swapped(training)
        cotrain_compile.synchronize()
        before = swapped(training)
        run_steps(training, 2, seed=3)
        return {**training.tensors(), "what was in it": before}

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_another_batch_shape_and_another_rate_start_when_the_tail_is_done(tmp_path: Path) -> None:
    """Each is a plan of its own over the same tensors; hooks cause no further compile."""

    def run(overlap: bool) -> tuple[dict[str, torch.Tensor], int]:
        torch._dynamo.reset()
        counters.clear()
        training = make_training(tmp_path, overlap=overlap)
        torch.manual_seed(3)
        large, small = vectors(), tuple(part[:4] for part in vectors())
        for batch in (large, small, large, small):
            training.step(*batch)
        training.optimizer.param_groups[0]["lr"] = 1e-3
        for batch in (small, large):
            training.step(*batch)
        return training.tensors(), counters["stats"]["unique_graphs"]

    tensors, graphs = run(True)
    expected, graphs_expected = run(False)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)
    assert graphs == graphs_expected


# Failures.


def test_a_tail_that_fails_is_told_once_by_the_next_step(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    run_steps(training, 2)
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    with with_kernels(training.compiled, failing(FIRST)):
        run_steps(training, 1)
        with pytest.raises(StepFailed) as failure:
            run_steps(training, 1)
    message = str(failure.value)
    assert (
        f"{FIRST} failed: the host is on fire. The step before failed while it updated" in message
    )
    assert "4 tensors may be half written (0.weight.step, 0.weight.exp_avg" in message
    assert "tensors are one step ahead of the rest" in message
    with pytest.raises(StepFailed, match="an earlier step failed while it updated, and"):
        run_steps(training, 1)
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    expected = make_training(tmp_path, overlap=False)
    run_steps(expected, 2)
    for one in (training, expected):
        run_steps(one, 2, seed=5)
    torch.testing.assert_close(training.tensors(), expected.tensors(), rtol=0, atol=0)


@pytest.mark.parametrize("ends_before_its_step", [False, True])
def test_a_tail_that_fails_is_told_once_by_synchronize(
    ends_before_its_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends_before_its_step:
        returns = DeferredWork.step_returns

        def when_all_is_done(tail: DeferredWork, *arguments: Any) -> None:
            tail.wait_quietly()
            returns(tail, *arguments)

        monkeypatch.setattr(DeferredWork, "step_returns", when_all_is_done)
    training = make_training(tmp_path)
    run_steps(training, 1)
    with with_kernels(training.compiled, failing(FIRST)):
        run_steps(training, 1)
    with pytest.raises(StepFailed, match="on fire"):
        cotrain_compile.synchronize()
    cotrain_compile.synchronize()
    with pytest.raises(StepFailed, match="an earlier step failed while it updated"):
        run_steps(training, 1)


def test_a_step_that_fails_early_leaves_the_tail_to_end_well(tmp_path: Path) -> None:
    """What the step before deferred is no change of this step."""
    training, expected = make_training(tmp_path), make_training(tmp_path, overlap=False)
    for one in (training, expected):
        run_steps(one, 2)
    device = training.compiled._device

    def fail(*_: Any) -> None:
        raise RuntimeError("the link is down")

    with mock.patch.object(device, "offload", fail), pytest.raises(RuntimeError) as failure:
        training.step(*vectors())
    assert any("No parameter or optimizer state was changed" in n for n in failure.value.__notes__)
    torch.testing.assert_close(training.tensors(), expected.tensors(), rtol=0, atol=0)


def test_an_interrupted_wait_leaves_the_tail_in_flight(tmp_path: Path) -> None:
    training, expected = make_training(tmp_path), make_training(tmp_path, overlap=False)
    for one in (training, expected):
        run_steps(one, 1)
    with held_back(training.compiled):
        run_steps(training, 1, seed=2)
        with (
            mock.patch.object(training.compiled._device, "drain", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            cotrain_compile.synchronize()
        assert training.compiled._device.is_busy
    run_steps(expected, 1, seed=2)
    torch.testing.assert_close(training.tensors(), expected.tensors(), rtol=0, atol=0)


# The end.


def test_a_step_that_is_collected_ends_its_tail_and_takes_its_hooks_away(tmp_path: Path) -> None:
    training, expected = make_training(tmp_path), make_training(tmp_path, overlap=False)
    for one in (training, expected):
        run_steps(one, 3)
    gone = weakref.ref(training.compiled)
    del training.step
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    hooks = [training.model._state_dict_pre_hooks, training.model._forward_pre_hooks]
    hooks.append(training.optimizer._optimizer_state_dict_pre_hooks)
    assert not any(hooks)
    torch.testing.assert_close(
        dict(training.model.state_dict()), dict(expected.model.state_dict()), rtol=0, atol=0
    )


def test_a_model_with_hooks_can_be_copied_and_pickled(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    run_steps(training, 2)
    cotrain_compile.synchronize()
    for other in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        torch.testing.assert_close(other.state_dict(), training.model.state_dict())


@pytest.mark.long
def test_a_process_ends_when_its_tail_has(tmp_path: Path) -> None:
    """What is registered first is called last, when all waiting is over."""
    code = f"""
import atexit
atexit.register(lambda: print("busy", device.is_busy))
from pathlib import Path
from tests.support.held_back import *
training = make_training(Path({str(tmp_path)!r}))
run_steps(training, 2)
device = training.compiled._device
with held_back(training.compiled) as gate:
    run_steps(training, 1)
    print("busy", device.is_busy)
    opening = threading.Timer(0.5, gate.set)
    opening.daemon = True
    opening.start()
    gate.set = lambda: None
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == ["busy True", "busy False"]


def test_a_saved_plan_that_overlaps_asks_for_the_option(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    run_steps(training, 1)
    compiled = training.compiled
    path = str(tmp_path / "plan.json")
    files.save(compiled.plan, path)
    assert saved_plan(path, compiled.problem, Options(overlap_steps=True)) == compiled.plan
    with pytest.raises(PlanError, match="the option overlap_steps allows: set it to True"):
        saved_plan(path, compiled.problem, Options())
