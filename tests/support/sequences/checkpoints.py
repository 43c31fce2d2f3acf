"""Checkpoints and copies: saved, loaded, in part, or where they do not fit."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import torch
import torch.nn.utils.prune
from torch import nn

from tests.support.sequences.optimizer_changes import new_optimizer
from tests.support.sequences.registry import action
from tests.support.sequences.twin import CLASSES, Training


@action
def load_what_does_not_fit(training: Training, rng: random.Random) -> None:
    """Raises in eager, too, when part of it is loaded."""
    saved = training.model.state_dict()
    if rng.random() < 0.5:
        saved["head.bias"] = torch.zeros(CLASSES + 1)
        training.model.load_state_dict(saved)
    else:
        groups = training.optimizer.state_dict()
        training.optimizer.load_state_dict({**groups, "param_groups": []})


@action
def load_a_part(training: Training, rng: random.Random) -> None:
    saved = {name: v * 0.9 for name, v in training.model.state_dict().items() if "first" in name}
    training.model.load_state_dict(saved, strict=False)


@action
def load_model(training: Training, rng: random.Random) -> None:
    saved = {name: value * 0.5 for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(_through_a_file(saved))


@action
def load_model_by_assigning(training: Training, rng: random.Random) -> None:
    saved = copy.deepcopy(training.model.state_dict())
    training.model.load_state_dict(saved, assign=True)
    if rng.random() < 0.5:
        new_optimizer(training, rng)


@action
def load_optimizer(training: Training, rng: random.Random) -> None:
    training.optimizer.load_state_dict(_through_a_file(training.optimizer.state_dict()))


@action
def load_emptied_optimizer(training: Training, rng: random.Random) -> None:
    saved = copy.deepcopy(training.optimizer.state_dict())
    training.optimizer.load_state_dict({**saved, "state": {}})


@action
def go_back(training: Training, rng: random.Random) -> Any:
    """A checkpoint, some steps, and the checkpoint again."""
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    losses = [training.call("train", *training.batch()) for _ in range(2)]
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    return losses


@action
def go_on_with_a_copy(training: Training, rng: random.Random) -> None:
    if not _can_be_copied(training):
        return
    for handle in training.hooks:
        handle.remove()
    training.hooks.clear()
    training.scheduler = None
    training.model, training.optimizer = copy.deepcopy((training.model, training.optimizer))
    training.rebuilt()


@action
def copy_and_leave(training: Training, rng: random.Random) -> None:
    if _can_be_copied(training):
        copy.deepcopy(training.model)(training.batch()[0])


@action
def compile_anew(training: Training, rng: random.Random) -> None:
    training.rebuilt()


@action
def average(training: Training, rng: random.Random) -> None:
    if training.average is None:
        if not _can_be_copied(training):
            return
        training.average = torch.optim.swa_utils.AveragedModel(training.model)
    mine = [p.shape for p in training.average.module.parameters()]
    if mine == [p.shape for p in training.model.parameters()]:
        training.average.update_parameters(training.model)


def _can_be_copied(training: Training) -> bool:
    """Not with pruned weights: behind a forward in eager they are no leaves, which torch wants.

    A compiled step leaves them without their graph.
    """
    return not nn.utils.prune.is_pruned(training.model.first)


def _through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)
