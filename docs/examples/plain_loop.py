"""A plain training loop under a memory budget, that goes on from its last checkpoint.

python docs/examples/plain_loop.py run.pt --steps 20
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OPTIONS = {"policy": "zero-offload", "host_kernels": "captured"}


def make_model() -> nn.Module:
    """A small network with dropout."""
    return nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4)
    )


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: the same, whether or not the run was interrupted before it."""
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :4].argmax(1)


def train(
    checkpoint: Path, steps: int, save_every: int = 2, options: dict = OPTIONS
) -> list[float]:
    """Train up to step `steps`, from `checkpoint` if it is there; the losses of this run."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step = torch.compile(step, backend="cotrain", options=options)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done = load_checkpoint(checkpoint, parts) if checkpoint.exists() else 0
    losses = []
    for number in range(done, steps):
        losses.append(step(*batch_of(number)).item())
        scheduler.step()
        if (number + 1) % save_every == 0:
            save_checkpoint(checkpoint, parts, number + 1)
    return losses


def save_checkpoint(path: Path, parts: dict, done: int) -> None:
    """Write a checkpoint whole or not at all: a process killed in here leaves the last one."""
    saved = {name: part.state_dict() for name, part in parts.items()}
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save({**saved, "done": done, "rng": torch.get_rng_state()}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_checkpoint(path: Path, parts: dict) -> int:
    """Go back to a checkpoint; how many steps had been done."""
    saved = torch.load(path)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["rng"])
    return saved["done"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for loss in train(arguments.checkpoint, arguments.steps):
        print(f"{loss:.4f}")
