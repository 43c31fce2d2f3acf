"""Lightning's Trainer: a module as written for any strategy trains as in eager."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler

from cotrain_compile.errors import OptionError
from cotrain_compile.integrations.lightning import CotrainStrategy

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
ROUNDING = 5e-5  # of the losses of a dozen steps in float32

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def test_losses_logs_and_schedules_are_those_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    train: Any = importlib.import_module("lightning_trainer").train
    settings = {"accelerator": "cpu", "accumulate_grad_batches": 2}
    losses = train(CotrainStrategy(cotrain={"policy": "zero-offload"}), **settings)
    assert counters["stats"]["unique_graphs"] == 1
    expected = train("auto", **settings)
    assert (len(losses), len(expected)) == (11, 12)
    # In eager every batch is logged. Here a batch that waits is logged with that which updates.
    losses, expected = losses[::2], expected[1::2]
    assert expected[-1] < 0.9 * expected[0]  # it learns
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < ROUNDING


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


SCALED = MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


@pytest.mark.parametrize(
    ("make", "settings", "told"),
    [
        (Manual, {}, "manual optimization; compile a function of your own"),
        (OwnBackward, {}, r"OwnBackward\.backward, which the compiled step would not call"),
        (Module, {"precision_plugin": SCALED}, "a scaled loss; give precision='bf16-mixed'"),
    ],
)
def test_what_a_step_cannot_hold_is_refused_before_it(
    make: Callable[[], LightningModule], settings: dict[str, Any], told: str
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        strategy=CotrainStrategy(**settings),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(OptionError, match=told):
        trainer.fit(make(), torch.ones(4, 2).split(2))


def test_a_wrong_option_is_refused_where_the_strategy_is_made() -> None:
    with pytest.raises(OptionError, match="did you mean 'memory_budget'"):
        CotrainStrategy(cotrain={"memory_bugdet": "20GiB"})
