"""Trainings by Accelerate, Fabric and Lightning go on from what these have saved, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning_fabric import Fabric
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import cotrain_compile
from cotrain_compile.integrations.lightning import CotrainStrategy

OPTIONS: Any = {"policy": "zero-offload", "quiet": True}
SAVED_AFTER, STEPS = 2, 4

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # theirs, of many kinds


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 8), torch.arange(4)) for _ in range(STEPS)]


def by_accelerate(folder: Path, begin: int, end: int) -> list[Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = cotrain_compile.compile(step, **OPTIONS)
    if begin:
        accelerator.load_state(str(folder))
    for x, y in batches()[begin:end]:
        run(x, y)
    accelerator.save_state(str(folder))
    return [p.detach().clone() for p in model.parameters()]


def by_fabric(folder: Path, begin: int, end: int) -> list[Tensor]:
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*parts())
    state = {"model": model, "optimizer": optimizer}

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    run = cotrain_compile.compile(step, **OPTIONS)
    if begin:
        fabric.load(folder / "state.ckpt", state)
    for x, y in batches()[begin:end]:
        run(x, y)
    fabric.save(folder / "state.ckpt", state)
    return [p.detach().clone() for p in model.parameters()]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = parts()[0]

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def by_lightning(folder: Path, begin: int, end: int) -> list[Tensor]:
    """An epoch is two steps, so that a checkpoint is at the end of one."""
    module, path = Module(), folder / "last.ckpt"
    rows: Any = [(x[i], y[i]) for x, y in batches()[:SAVED_AFTER] for i in range(4)]
    trainer = Trainer(
        strategy=CotrainStrategy(cotrain=OPTIONS),
        accelerator="cpu",
        max_epochs=end // SAVED_AFTER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=4), ckpt_path=str(path) if begin else None)
    assert trainer.global_step == end
    trainer.save_checkpoint(path)
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("run", [by_accelerate, by_fabric, by_lightning])
def test_a_training_goes_on_from_what_was_saved(run: Any, tmp_path: Path) -> None:
    whole = run(tmp_path, 0, STEPS)
    half = run(tmp_path, 0, SAVED_AFTER)
    assert not torch.equal(half[0], whole[0])
    torch.testing.assert_close(run(tmp_path, SAVED_AFTER, STEPS), whole, rtol=0, atol=0)
