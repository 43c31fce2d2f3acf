"""Checkpoints are plain PyTorch's, in every direction, and a resumed run is the uninterrupted one.

Bitwise, with the captured operations on both sides of a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from tests.support.steps import (
    OPTIMIZERS,
    Case,
    Step,
    all_tensors,
    cotrain,
    cross_entropy,
    make_step,
    vectors,
)

# Ways to run a step: None is eager.
RUNS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "resident": {"policy": "resident"},
    "zero-offload": {"policy": "zero-offload", "host_kernels": "captured"},
    "streamed": {"policy": "streamed", "host_kernels": "captured"},
}
BEFORE, AFTER = 2, 3


def make_small() -> nn.Module:
    """A matrix, a bias, and random numbers."""
    return nn.Sequential(nn.Linear(12, 4), nn.Dropout(0.1))


SMALL = Case(make_small, vectors, cross_entropy)


@dataclass(frozen=True)
class Training:
    """A model in training; what a checkpoint holds of it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    batches: list[tuple[Tensor, ...]]

    def run(self, how: str, first: int, count: int) -> None:
        """Take steps, each with the random numbers and the learning rate of its own."""
        options = RUNS[how]
        step: Step = make_step(self.model, [self.optimizer], SMALL.loss_of)
        if options is not None:
            step = cotrain(**options)(step)
        for number in range(first, first + count):
            torch.manual_seed(number)
            step(*self.batches[number])
            self.scheduler.step()

    def left(self) -> dict[str, Tensor]:
        return all_tensors(self.model, [self.optimizer])


def make_training(optimizer: str = "adamw-groups", seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = SMALL.make_model()
    (made,) = OPTIMIZERS[optimizer](model)
    torch.manual_seed(99)
    batches = [SMALL.make_batch() for _ in range(BEFORE + AFTER)]
    return Training(model, made, torch.optim.lr_scheduler.ExponentialLR(made, 0.9), batches)


# The formats: each takes a training to a folder and another one from there.


def through_torch_save(saved: Training, loaded: Training, folder: Path) -> None:
    torch.save((saved.model.state_dict(), saved.optimizer.state_dict()), folder / "all.pt")
    model, optimizer = torch.load(folder / "all.pt")
    loaded.model.load_state_dict(model)
    loaded.optimizer.load_state_dict(optimizer)


def through_memory(saved: Training, loaded: Training, folder: Path) -> None:
    loaded.model.load_state_dict(saved.model.state_dict())
    loaded.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))


def through_safetensors(saved: Training, loaded: Training, folder: Path) -> None:
    save_file(saved.model.state_dict(), folder / "model.safetensors")
    loaded.model.load_state_dict(load_file(folder / "model.safetensors"))
    torch.save(saved.optimizer.state_dict(), folder / "optimizer.pt")
    loaded.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))


def through_distributed_checkpoint(saved: Training, loaded: Training, folder: Path) -> None:
    model, optimizer = get_state_dict(saved.model, saved.optimizer)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(loaded.model, loaded.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    load(state, checkpoint_id=folder)
    set_state_dict(
        loaded.model,
        loaded.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


FORMATS = {
    "memory": through_memory,
    "torch.save": through_torch_save,
    "safetensors": through_safetensors,
    "distributed": through_distributed_checkpoint,
}
DIRECTIONS = [("eager", "zero-offload"), ("zero-offload", "eager")]
MORE_DIRECTIONS = [
    ("streamed", "zero-offload"),
    ("zero-offload", "zero-offload"),
    ("resident", "streamed"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("before", "after", "through"),
    [
        *((before, after, "torch.save") for before, after in DIRECTIONS),
        ("zero-offload", "streamed", "distributed"),
        *(pytest.param(*both, "torch.save", marks=pytest.mark.long) for both in MORE_DIRECTIONS),
        *(
            pytest.param("zero-offload", "streamed", through, marks=pytest.mark.long)
            for through in ("memory", "torch.save", "safetensors")
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    before: str, after: str, through: str, tmp_path: Path
) -> None:
    uninterrupted = make_training()
    uninterrupted.run(before, 0, BEFORE)
    resumed = make_training(seed=1)
    FORMATS[through](uninterrupted, resumed, tmp_path)
    resumed.scheduler.load_state_dict(uninterrupted.scheduler.state_dict())
    uninterrupted.run(after, BEFORE, AFTER)
    resumed.run(after, BEFORE, AFTER)
    torch.testing.assert_close(resumed.left(), uninterrupted.left(), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop", "adagrad", "nadam", "adafactor"])
def test_every_optimizer_resumes(optimizer: str, tmp_path: Path) -> None:
    uninterrupted, resumed = make_training(optimizer), make_training(optimizer, seed=1)
    uninterrupted.run("zero-offload", 0, BEFORE)
    through_torch_save(uninterrupted, resumed, tmp_path)
    resumed.scheduler.load_state_dict(uninterrupted.scheduler.state_dict())
    for training in (uninterrupted, resumed):
        training.run("streamed", BEFORE, AFTER)
    torch.testing.assert_close(resumed.left(), uninterrupted.left(), rtol=0, atol=0)


# Into a step that is compiled already.


def compiled_training() -> tuple[Training, Step, Callable[[], int]]:
    """A training that has taken a step, its step function, and how often that was compiled."""
    training = make_training("adamw")
    step = make_step(training.model, [training.optimizer], SMALL.loss_of)
    compiled = cotrain(**RUNS["zero-offload"] or {})(step)
    compiled(*training.batches[0])
    return training, compiled, lambda: counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_loading_does_not_compile_again(tmp_path: Path) -> None:
    training, step, compiles = compiled_training()
    assert compiles() == 1
    other = make_training("adamw", seed=1)
    for through in FORMATS.values():
        make_step(other.model, [other.optimizer], SMALL.loss_of)(*other.batches[1])
        through(other, training, tmp_path)
        torch.testing.assert_close(training.left(), other.left(), rtol=0, atol=0)
        step(*training.batches[2])
        assert compiles() == 1


def test_loaded_states_land_in_the_tensors_that_are_their_homes(tmp_path: Path) -> None:
    training, step, _ = compiled_training()
    saved = training.optimizer.state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    expected = training.left()
    homes = [value for state in training.optimizer.state.values() for value in state.values()]
    step(*training.batches[1])
    training.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    landed = [value for state in training.optimizer.state.values() for value in state.values()]
    assert [a is b for a, b in zip(homes, landed, strict=True) if a.dim()] == [True] * 4
    loaded = {
        name: v for name, v in training.left().items() if name.split(".")[-1] in saved["state"][0]
    }
    assert loaded
    torch.testing.assert_close(loaded, {name: expected[name] for name in loaded}, rtol=0, atol=0)


def test_states_keep_the_precision_of_their_homes() -> None:
    """torch would cast them to the precision of their parameter."""
    training, _, _ = compiled_training()
    weight = training.model.get_parameter("0.weight")
    homes = training.optimizer.state[weight]
    homes["exp_avg"] = wide = homes["exp_avg"].double()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert training.optimizer.state[weight]["exp_avg"] is wide


def test_a_refused_load_changes_nothing() -> None:
    training, _, _ = compiled_training()
    before = training.left()
    bad = copy.deepcopy(training.optimizer.state_dict())
    for state in bad["state"].values():
        state["exp_avg"].fill_(7)
    bad["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        training.optimizer.load_state_dict(bad)
    torch.testing.assert_close(training.left(), before, rtol=0, atol=0)


def test_what_has_no_home_of_its_shape_is_left_to_torch() -> None:
    training, _, _ = compiled_training()
    saved = copy.deepcopy(training.optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.ones(3)
    saved["state"][0]["note"] = {"kept": [1, 2]}
    del saved["state"][1]
    training.optimizer.load_state_dict(saved)
    first, second = list(training.model.parameters())[:2]
    assert torch.equal(training.optimizer.state[first]["exp_avg"], torch.ones(3))
    assert training.optimizer.state[first]["note"] == {"kept": [1, 2]}
    assert second not in training.optimizer.state


def test_replaced_parameters_are_seen() -> None:
    """`assign=True` leaves the optimizer with parameters that are no longer the model's."""
    trainings = [make_training("adamw") for _ in range(2)]
    left = []
    for training, options in zip(trainings, (None, RUNS["resident"]), strict=True):
        step = make_step(training.model, [training.optimizer], SMALL.loss_of)
        step = step if options is None else cotrain(**options)(step)
        torch.manual_seed(3)
        step(*training.batches[0])
        zeros = {name: v.zero_() for name, v in copy.deepcopy(training.model.state_dict()).items()}
        training.model.load_state_dict(zeros, assign=True)
        torch.manual_seed(4)
        left.append(step(*training.batches[1]).detach())
        assert all(not value.any() for value in training.model.state_dict().values())
    torch.testing.assert_close(left[1], left[0])
