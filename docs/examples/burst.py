"""Training in which every layer runs on as many ranks as are worth it.

    cotrain-compile cluster step.json --cluster 8xrtx4090 --strategies burst -o plan.json
    torchrun --nproc-per-node 2 burst.py --checkpoint model.pt

Without `--plan` the widths are those below. The checkpoint is that of a plain model.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from chain import batch
from torch import nn

import cotrain_compile

WIDTHS = {"0": 2, "1": 2, "2": 1}


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4))


def train(plan: Any, steps: int, checkpoint: Path) -> list[float]:
    """Train so many steps; the losses."""
    model = make_model()
    wide = cotrain_compile.burst(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(wide.backward(F.cross_entropy, *batch(number)))
        optimizer.step()
    if dist.get_rank() == 0:  # it has every layer
        torch.save(model.state_dict(), checkpoint)
        print(f"last loss {losses[-1]:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, help="the saved answer of cotrain-compile cluster")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, required=True)
    asked = parser.parse_args()
    # Ranks that wait for one that hangs give up after this time.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train(asked.plan or WIDTHS, asked.steps, asked.checkpoint)
    dist.destroy_process_group()
