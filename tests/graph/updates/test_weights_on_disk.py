"""Weights on disk: cast and fetched from there, updated there, and torch sees them as ever."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cotrain_compile.entry.compiled import inspect, synchronize
from cotrain_compile.runtime.disk.state_files import StateFile, file_of

pytestmark = pytest.mark.usefixtures("small_pieces")

WIDTHS = (16, 2000, 2500)
FROZEN_WIDTHS = (16, 1250, 1250, 1250)
IN_MEMORY: dict[str, Any] = {
    "machine": "rtx4090",
    "policy": "zero-offload",
    "memory_budget": "1GiB",
    "plan_cache": False,
    "quiet": True,
}


class Training:
    """A few layers, AdamW on all or on the first, and a step that clips."""

    def __init__(self, *, autocast: bool = False, frozen: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.autocast = autocast
        layers = [nn.Linear(a, b) for a, b in pairwise(FROZEN_WIDTHS if frozen else WIDTHS)]
        self.model = nn.Sequential(*layers)
        for layer in layers[1:]:
            layer.requires_grad_(not frozen)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        torch._dynamo.reset()
        self.step = torch.compile(self._step, backend="cotrain", options={**IN_MEMORY, **options})

    def _step(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(x).float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    def train(self, steps: range) -> None:
        for step in steps:
            batch = torch.Generator().manual_seed(step)
            self.step(torch.randn(4, WIDTHS[0], generator=batch))
        synchronize()

    @property
    def files(self) -> list[StateFile]:
        """Where weights rest."""
        return [file for p in self.model.parameters() if (file := file_of(p)) is not None]

    @property
    def states(self) -> dict[str, Any]:
        """What a checkpoint has."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def tensors(self) -> list[Tensor]:
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self.model.parameters(), *states]


WEIGHT_BYTES = 4 * WIDTHS[1] * WIDTHS[2]
# What the host holds with nothing of the large weight, of each of its bytes: the gradient and what
# an update makes where it runs op by op.
HELD = 6.5
# Of two that are frozen the device has room for one, and the host, beside rooms, for none.
FROZEN: dict[str, Any] = {"policy": "greedy", "frozen": True, "memory_budget": "7.5MiB"}
KINDS: dict[str, dict[str, Any]] = {
    "fetched": {"host_memory_budget": round(HELD * WEIGHT_BYTES)},
    "cast": {"autocast": True, "host_memory_budget": round(6 * WEIGHT_BYTES)},
    "deferred": {"overlap_steps": True, "host_memory_budget": round(HELD * WEIGHT_BYTES)},
    "frozen": {**FROZEN, "host_memory_budget": "10MiB"},
}


def assert_equal(one: Training, other: Training) -> None:
    for a, b in zip(one.tensors, other.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind",
    # The checkpoints below are of a weight that is fetched.
    [pytest.param(k, marks=pytest.mark.long if k == "fetched" else ()) for k in KINDS],
)
def test_a_step_whose_weight_rests_on_disk_is_the_same_step(kind: str, tmp_path: Path) -> None:
    options = KINDS[kind]
    with_disk = Training(**options, disk=tmp_path)
    with_disk.train(range(3))
    assert with_disk.files
    assert not list(tmp_path.iterdir())
    compiled = inspect(with_disk.step)
    assert compiled.measured is not None
    peaks, plan = compiled.measured.peak_bytes, compiled.plan
    assert all(peaks[t] <= plan.predicted.peak_bytes[t] <= plan.budgets[t] for t in plan.tiers)
    without = Training(**{**options, "host_memory_budget": "1GiB"})
    without.train(range(3))
    assert not without.files
    assert_equal(with_disk, without)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # so it is
def test_checkpoints_of_both_kinds_have_what_rests_on_disk(tmp_path: Path) -> None:
    """Saved in the middle, loaded into where it rests, and into memory: each goes on alike."""
    first, folder = Training(**KINDS["fetched"], disk=tmp_path), tmp_path / "sharded"
    first.train(range(2))
    files = first.files
    torch.save(first.states, tmp_path / "whole.pt")
    save(first.states, checkpoint_id=folder, no_dist=True)
    first.train(range(2, 4))
    expected = [tensor.clone() for tensor in first.tensors]
    held = first.states
    load(held, checkpoint_id=folder, no_dist=True)
    first.optimizer.load_state_dict(held["optimizer"])
    first.train(range(2, 4))
    assert first.files == files
    other = Training(**{**KINDS["fetched"], "host_memory_budget": "1GiB"})
    whole = torch.load(tmp_path / "whole.pt")
    other.model.load_state_dict(whole["model"])
    other.optimizer.load_state_dict(whole["optimizer"])
    other.train(range(2, 4))
    for training in (first, other):
        for tensor, wanted in zip(training.tensors, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
