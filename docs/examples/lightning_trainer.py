"""Lightning Trainer: another strategy, and the options.

python docs/examples/lightning_trainer.py
"""

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.strategies import Strategy
from text import make_dataset, make_model
from torch import Tensor

from cotrain_compile.integrations.lightning import CotrainStrategy


class LanguageModel(LightningModule):
    """As written for any strategy: it returns the loss and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        """Keep what was logged."""
        if "loss" in self.trainer.callback_metrics:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> dict:
        """AdamW, with a learning rate that falls in every step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=12)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def train(strategy: Strategy | str, **settings: object) -> list[float]:
    """Two epochs; the loss that is logged after each batch."""
    seed_everything(0, verbose=False)
    module = LanguageModel()
    loader = torch.utils.data.DataLoader(make_dataset(), batch_size=4, shuffle=True)
    trainer = Trainer(
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, loader)
    return module.losses


if __name__ == "__main__":
    for loss in train(CotrainStrategy(cotrain={"policy": "zero-offload"})):
        print(f"{loss:.4f}")
