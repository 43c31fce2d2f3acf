"""Checkpoints: what ranks save under one plan, other numbers of ranks load under another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import cotrain_compile
from tests.support.ranks import Ranks
from tests.support.sharded_training import MODELS, OPTIMIZERS, Net, batch, step_of, whole

BUDGET = 15_000  # bytes: parts of parameters and states rest on the host
PLACED = {"memory_budget": BUDGET, "quiet": True}


@dataclass(frozen=True)
class Saved:
    """What a model and its optimizer hold, as one rank alone would, and the loss of a step more."""

    state: dict[str, torch.Tensor]
    loss: float
    compiled: int


class _Run:
    """A model of `kind` ("" for one that is not sharded) and its step, in eager without options."""

    def __init__(self, kind: str, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = MODELS[kind](Net()) if kind else Net()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS["adamw"](trained)
        self.step: Any = step_of(self.model, self.optimizer, "clipped")
        if options is not None:
            self.step = torch.compile(self.step, backend="cotrain", options=options)

    def train(self, first: int, steps: int = 1) -> float:
        """The last loss; every rank has the same batches, so that their number changes nothing."""
        losses = [float(self.step(*batch(first + number, 0))) for number in range(steps)]
        return losses[-1]

    def states(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def held(self) -> dict[str, torch.Tensor]:
        states = self.states()
        of_params = states["optimizer"]["state"].items()
        moments = {f"{param}.{key}": v for param, held in of_params for key, v in held.items()}
        return whole({**states["model"], **moments})


def save(rank: int, kind: str, options: dict[str, Any] | None, folder: str) -> Saved:
    run = _Run(kind, options)
    run.train(0, 2)
    save_checkpoint(run.states(), checkpoint_id=folder)
    held = run.held()
    assert options is None or cotrain_compile.inspect(run.step).plan.tasks
    return Saved(held, run.train(2), 0)


def load(rank: int, kind: str, options: dict[str, Any] | None, folder: str) -> Saved:
    """Into a run that has trained on something else already."""
    counters.clear()
    run = _Run(kind, options)
    run.train(7)
    states = run.states()
    load_checkpoint(states, checkpoint_id=folder)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    held = run.held()
    return Saved(held, run.train(2), counters["stats"]["unique_graphs"])


def _goes_on(found: Saved, saved: Saved) -> None:
    assert found.state.keys() == saved.state.keys()
    assert all(torch.equal(found.state[name], saved.state[name]) for name in saved.state)
    assert found.loss == pytest.approx(saved.loss, abs=2e-6)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_two_ranks_goes_on_on_one(two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks.run(save, "shard", PLACED, str(tmp_path))[0]
    assert not dist.is_initialized()
    found = load(0, "", PLACED, str(tmp_path))
    _goes_on(found, saved)
    assert found.compiled == 1


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_goes_on_on_three(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    saved = two_ranks.run(save, "shard", PLACED, str(tmp_path))[0]
    for found in three_ranks.run(load, "shard", {"quiet": True}, str(tmp_path)):
        _goes_on(found, saved)
        assert found.compiled == 1


@pytest.mark.long
def test_checkpoints_are_those_of_fully_shard_both_ways(two_ranks: Ranks, tmp_path: Path) -> None:
    ours, eager = str(tmp_path / "ours"), str(tmp_path / "eager")
    saved = two_ranks.run(save, "fully_shard", PLACED, ours)[0]
    _goes_on(two_ranks.run(load, "fully_shard", None, ours)[0], saved)
    saved = two_ranks.run(save, "fully_shard", None, eager)[0]
    _goes_on(two_ranks.run(load, "shard", PLACED, eager)[0], saved)
