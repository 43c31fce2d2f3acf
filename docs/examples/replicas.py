"""Training with the whole model on every rank, each within a budget of its own.

    torchrun --nproc-per-node 2 replicas.py --budget 200KiB --checkpoint model.pt

Each rank has its share of a step's samples in micro-batches. With `--order by-layer` a layer runs
for all of them before the next, so that its weights come from the host once a pass (Harmony's
data parallelism). The checkpoint is that of a plain model.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from chain import Model, batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile

MICRO_BATCHES = 4


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Model(depth=6)


def train(steps: int, budget: str, order: str, checkpoint: Path) -> tuple[list[float], int]:
    """Train so many steps; the losses of this rank, and how many layers run as one pack."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        parts = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))
        for number, (part, wanted) in enumerate(parts):
            last = number == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(part), wanted) / MICRO_BATCHES
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    options: dict[str, Any] = {"memory_budget": budget, "micro_batch_order": order}
    run: Any = torch.compile(step, backend="cotrain", options=options)
    losses = [float(run(*batch(number, dist.get_rank()))) for number in range(steps)]
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), checkpoint)
        print(f"last loss {losses[-1]:.6f}", flush=True)
    return losses, cotrain_compile.inspect(run).plan.placement.layers_per_pack


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", default="200KiB", help="of the device, for each rank")
    parser.add_argument("--order", default="auto", choices=("auto", "as-written", "by-layer"))
    parser.add_argument("--checkpoint", type=Path, required=True)
    asked = parser.parse_args()
    # Ranks that wait for one that hangs give up after this time.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train(asked.steps, asked.budget, asked.order, asked.checkpoint)
    dist.destroy_process_group()
