"""Training in stages: each rank holds a part of the layers, within a budget of its own.

    cotrain-compile cluster step.json --cluster 8xrtx4090 --strategies pipeline-1f1b -o plan.json
    torchrun --nproc-per-node 2 pipeline.py --plan plan.json --save checkpoint

The plan is what `cotrain-compile cluster` has saved, or a `StagePlan`; by `--strategies harmony-pp`
it has more stages than ranks, which come to the device for their turns. Ranks save one checkpoint
together, with the names of the whole model: one process alone can load it, or other stages.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from chain import Model, batch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import cotrain_compile

# Ranks have other parameters, so that a list of them would differ from rank to rank.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Model(depth=4)


def train(
    plan: Path,
    steps: int,
    budget: str,
    load_from: Path | None,
    save: Path,
    strategy: str | None = None,
) -> list[float]:
    """Train so many steps, from a checkpoint if one is given, and save one; the losses."""
    model = make_model()
    x, y = batch(0)
    options = {"memory_budget": budget}
    pipe = cotrain_compile.pipeline(
        model, plan, F.cross_entropy, (x,), y, strategy=strategy, options=options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # of this rank's part
    update = pipe.compiled_update(optimizer)
    if load_from is not None:
        load(load_from, model, optimizer)
    means: list[float] = []
    for number in range(steps):
        x, y = batch(number)
        losses: list[torch.Tensor] = []
        pipe.step(x, target=y, losses=losses)
        update()
        means.append(float(torch.stack(losses).mean()))  # the same on all ranks
        if dist.get_rank() == 0:
            print(f"step {number}: loss {means[-1]:.6f}", flush=True)
    states = get_state_dict(model, optimizer, options=FLAT)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=save)
    return means


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What ranks, or one process, have saved: of it what this one holds."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=FLAT)
    states = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=FLAT,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--strategy", help="of those in the plan, such as harmony-pp")
    parser.add_argument("--load", type=Path, help="a checkpoint to begin with")
    parser.add_argument("--save", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", default="64KiB", help="of the device, for this rank")
    asked = parser.parse_args()
    # Ranks that wait for one that hangs give up after this time.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train(asked.plan, asked.steps, asked.budget, asked.load, asked.save, asked.strategy)
    dist.destroy_process_group()
