"""Hugging Face Trainer: another class, and the options.

python docs/examples/hf_trainer.py
"""

import tempfile

from text import make_dataset, make_model
from transformers import TrainingArguments, set_seed

from cotrain_compile.integrations.transformers import CotrainTrainer


def train(output: str, cotrain: dict, **arguments: object) -> list[float]:
    """Two epochs; the loss of every step."""
    set_seed(0)
    settings = TrainingArguments(
        output,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        **arguments,
    )
    trainer = CotrainTrainer(
        model=make_model(), args=settings, train_dataset=make_dataset(), cotrain=cotrain
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder, {"policy": "zero-offload"})
