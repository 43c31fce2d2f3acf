"""Other threads and processes: what a fork finds, DataLoader workers, steps in two threads."""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import cotrain_compile
from cotrain_compile.errors import StepFailed
from cotrain_compile.runtime.lanes import WorkerLane
from tests.graph.passes.test_races import plan_at_random
from tests.support.captured_steps import captured, differences, place, reference
from tests.support.faults import SETTINGS, compile_setting, trial_of, undisturbed
from tests.support.held_back import held_back, make_training

# CPython from 3.12 on warns of every fork of a process with threads; that is what is tried here.
pytestmark = [
    pytest.mark.usefixtures("watchdog", "one_thread"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, which ends as a program of its own does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = "".join(traceback.format_exception(error))
        with os.fdopen(writer, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = pickle.load(file)
    assert os.waitpid(child, 0) == (child, 0)
    return answer


def test_a_forked_process_is_told_that_it_cannot_run_the_step() -> None:
    trial, _ = trial_of("host")

    def run() -> str:
        try:
            trial.take_step()
        except StepFailed as error:
            return str(error)
        return "no error"

    assert "forked from the one that compiled the step" in in_a_fork(run)
    trial.take_step()
    assert not differences(trial.inputs, undisturbed("clipped")[1])


def test_a_fork_finds_every_update_whole(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    batch = torch.randn(8, 12), torch.randint(4, (8,))
    training.step(*batch)
    with held_back(training.compiled) as gate:
        training.step(*batch)
        threading.Timer(0.2, gate.set).start()
        found = in_a_fork(lambda: [t.tolist() for t in training.tensors().values()])
    assert found == [tensor.tolist() for tensor in training.tensors().values()]


def test_a_fork_ends_like_any_process() -> None:
    lane = WorkerLane("host")
    lane.submit("update.w", lambda: None, ()).done.wait()
    child = os.fork()
    if child == 0:
        from cotrain_compile.runtime import lanes

        lanes._finish()  # what the end of the interpreter calls
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_workers_that_load_data_are_forked_between_steps(tmp_path: Path) -> None:
    def train(workers: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        training = make_training(tmp_path)
        x = torch.randn(24, 12)
        loader = DataLoader(TensorDataset(x, x.argmax(1) % 4), batch_size=8, num_workers=workers)
        for _ in range(2):
            for batch in loader:
                training.step(*batch)
        return training.tensors()

    torch.testing.assert_close(train(2), train(0), rtol=0, atol=0)


# Threads.


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    results: dict[int, Any] = {}

    def run(number: int, work: Callable[[], Any]) -> None:
        try:
            results[number] = work()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(works))]


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_steps_of_two_models_run_in_two_threads(overlap: bool) -> None:
    names = ("autocast", "autocast-unclipped")  # threads share random numbers: no dropout
    steps = {name: place(name, plan_at_random(name, 3, overlap=overlap)) for name in names}
    expected = {name: reference(name) for name in names}

    def train(name: str) -> Callable[[], list[Any]]:
        return lambda: captured(name).train(steps[name])

    for _ in range(5):
        left = in_threads(*map(train, names))
        cotrain_compile.synchronize()
        for name, found in zip(names, left, strict=True):
            assert not isinstance(found, BaseException), found
            assert not differences(found, expected[name])


def test_one_step_in_two_threads_is_refused_and_the_first_goes_on() -> None:
    compiled = compile_setting("host")
    trial, _ = trial_of("host")
    device: Any = compiled._device
    inside, go_on = threading.Event(), threading.Event()
    copy = device._copy

    def hold(*arguments: Any) -> None:
        inside.set()
        go_on.wait()
        copy(*arguments)

    device._copy = hold
    trial = type(trial)(trial.step, compiled, trial.inputs)

    def second() -> str:
        inside.wait()
        try:
            compiled(list(trial.inputs))
        except StepFailed as error:
            return str(error)
        finally:
            go_on.set()
        return "no error"

    _, said = in_threads(trial.take_step, second)
    assert "is at work in another thread" in said
    assert not differences(trial.inputs, undisturbed(SETTINGS["host"].training)[1])


def test_two_threads_compile_and_train_steps_of_their_own(tmp_path: Path) -> None:
    def trained(width: int) -> Callable[[], dict[str, Tensor]]:
        training = make_training(tmp_path, overlap=False)
        training.model.eval()  # threads share random numbers: no dropout
        x = torch.linspace(-1, 1, 12 * width).reshape(width, 12)

        def train() -> dict[str, Tensor]:
            for _ in range(3):
                training.step(x, x.argmax(1) % 4)
            return training.tensors()

        return train

    expected = [trained(8)(), trained(16)()]
    torch._dynamo.reset()
    for found, wanted in zip(in_threads(trained(8), trained(16)), expected, strict=True):
        assert not isinstance(found, BaseException), found
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
