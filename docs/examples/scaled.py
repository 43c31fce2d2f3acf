"""Training as a row of a plan says, whichever it is: replicas, shards, split layers, stages.

    cotrain-compile cluster step.json --cluster 8xrtx4090 -o plan.json
    torchrun --nproc-per-node 8 scaled.py --plan plan.json

Without a plan, sizes of the mesh are given: `--mesh shard=2,tensor=2`. Each replica has samples of
its own; ranks that share a layer, or have stages of one replica, have the same.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from chain import batch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import cotrain_compile
from cotrain_compile.cluster.model.layout import StagePlan

# How layers are split, and where stages begin, where the plan does so and does not say it.
SPLIT = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
STAGES = StagePlan("1F1B", ("layers.2",), 4, 4)


class Layer(nn.Module):
    """An MLP with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Model(nn.Module):
    """Layers, one behind the other."""

    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.last(x)
        return logits


def train(plan: Path | Mapping[str, int], steps: int, budget: str) -> list[float]:
    """Train so many steps; the losses of this replica's samples."""
    x, y = batch(0)
    scaled = cotrain_compile.scale(
        Model(),
        plan,
        F.cross_entropy,
        (x,),
        y,
        stages=STAGES if isinstance(plan, Mapping) and "pipeline" in plan else None,
        tensor_plan=SPLIT,
        options={"memory_budget": budget},
    )
    optimizer = torch.optim.AdamW(scaled.parameters(), lr=1e-2)
    step = scaled.compiled_step(optimizer, max_norm=1.0)
    losses = []
    for number in range(steps):
        x, y = batch(number, scaled.replica)
        losses.append(float(step(x, target=y)))
    print(f"replica {scaled.replica} of {scaled.replicas}: last loss {losses[-1]:.6f}", flush=True)
    return losses


def sizes(text: str) -> dict[str, int]:
    """`shard=2,tensor=2` as a dictionary."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--plan", type=Path)
    which.add_argument("--mesh", type=sizes)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", default="200KiB", help="of the device, for each rank")
    asked = parser.parse_args()
    # Ranks that wait for one that hangs give up after this time.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    train(asked.plan or asked.mesh, asked.steps, asked.budget)
    dist.destroy_process_group()
