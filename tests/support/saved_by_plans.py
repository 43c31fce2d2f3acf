"""Trainings of ranks that a checkpoint of `torch.distributed.checkpoint` ends and begins."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import cotrain_compile
from tests.support.example_scripts import example
from tests.support.helped_ranks import HELPERS


class Training:
    """The model of an example with its optimizer, in one process or on a rank."""

    def __init__(self, name: str) -> None:
        self.code = example(name)
        self.model: nn.Module = self.code.make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def load(self, folder: Path) -> None:
        """What one process has saved, by this one alone."""
        states = self._states()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that this process is alone in it
            load(states, checkpoint_id=folder, no_dist=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )

    def save(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(self._states(), checkpoint_id=folder, no_dist=True)

    def alone(self, numbers: range, ranks: int = 0) -> None:
        """Steps of one process: of the whole batch, or of the mean over batches of `ranks`."""
        for number in numbers:
            self.optimizer.zero_grad()
            for rank in range(max(1, ranks)):
                x, y = self.code.batch(number, rank) if ranks else self.code.batch(number)
                (F.cross_entropy(self.model(x), y) / max(1, ranks)).backward()
            self.optimizer.step()

    def _states(self) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer}


def burst_goes_on(rank: int, numbers: range, begin: Path | None, end: Path) -> None:
    """Layers by widths."""
    training = Training("burst")
    if begin is not None:
        training.load(begin)
    wide = cotrain_compile.burst(training.model, training.code.WIDTHS)
    for number in numbers:
        training.optimizer.zero_grad()
        wide.backward(F.cross_entropy, *training.code.batch(number))
        training.optimizer.step()
    if rank == 0:
        training.save(end)


def helped_goes_on(rank: int, numbers: range, begin: Path | None, end: Path) -> None:
    """Two workers and a helper."""
    training = Training("cpu_helpers")
    if begin is not None:
        training.load(begin)
    with cotrain_compile.cpu_helpers(training.model, HELPERS) as exchange:
        if exchange.helps:
            exchange.serve()
            return
        for number in numbers:
            training.optimizer.zero_grad()
            x, y = training.code.batch(number, rank)
            F.cross_entropy(training.model(x), y).backward()
            exchange.average_gradients()
            training.optimizer.step()
    if rank == 0:
        training.save(end)
