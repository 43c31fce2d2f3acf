"""Training whose gradients CPU machines sum too: the last ranks are helpers and train nothing.

    torchrun --nproc-per-node 3 cpu_helpers.py --helpers 1 --checkpoint model.pt

Workers have a batch each. The checkpoint is that of a plain model: one process alone can load it.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from chain import batch
from torch import nn

import cotrain_compile


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4))


def train(helpers: int, steps: int, checkpoint: Path) -> list[float]:
    """Train so many steps, or help others to; the losses of this rank."""
    model = make_model()
    losses: list[float] = []
    with cotrain_compile.cpu_helpers(model, helpers) as exchange:
        if exchange.helps:
            exchange.serve()
            return losses
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(steps):
            x, y = batch(number, exchange.rank)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            with exchange.beside_backward():
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if exchange.rank == 0:
        torch.save(model.state_dict(), checkpoint)
        print(f"last loss {losses[-1]:.6f}, sent {exchange.sent_bytes} bytes", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--helpers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, required=True)
    asked = parser.parse_args()
    # Ranks that wait for one that hangs give up after this time.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train(asked.helpers, asked.steps, asked.checkpoint)
    dist.destroy_process_group()
