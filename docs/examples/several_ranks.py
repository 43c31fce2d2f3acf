"""Training on several ranks that goes on from its last checkpoint when one of them fails.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a restart finds addresses of ranks that died
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 several_ranks.py --folder checkpoints

torchrun ends all ranks where one fails, and starts all of them again; a checkpoint is what they
have in common then. It is written to a new folder, and counts when `latest` names it.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import cotrain_compile


def main(folder: Path, steps: int, every: int, fail_at: int | None) -> None:
    """Train so many steps; rank 1 fails before step `fail_at`, the first time that it starts."""
    # Ranks that wait for one that hangs give up after this time.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    model = cotrain_compile.shard(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = torch.compile(step, backend="cotrain", options={"memory_budget": "64KiB"})
    done = load(folder, model, optimizer)
    for number in range(done, steps):
        if number == fail_at and dist.get_rank() == 1 and not is_a_restart():
            raise RuntimeError("this rank fails for once")
        loss = run(*batch(number, dist.get_rank()))
        if (number + 1) % every == 0:
            save(folder, number + 1, model, optimizer)
    print(f"rank {dist.get_rank()}: {done} to {steps}, last loss {float(loss):.6f}", flush=True)
    dist.destroy_process_group()


def is_a_restart() -> bool:
    """Whether torchrun has started the ranks before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a step and a rank whenever it is asked for, so that a restart repeats it."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :4].argmax(1)


def save(folder: Path, done: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write what all ranks hold after so many steps."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / str(done))
    if dist.get_rank() == 0:  # all parts are there: name it, at once and as a whole
        (folder / "latest.new").write_text(str(done))
        (folder / "latest.new").replace(folder / "latest")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many steps the last checkpoint has, which is loaded; 0 where there is none."""
    latest = folder / "latest"
    if not latest.exists():
        return 0
    done = int(latest.read_text())
    of_model, of_optimizer = get_state_dict(model, optimizer)
    states = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(states, checkpoint_id=folder / str(done))
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--fail-at", type=int, help="let rank 1 fail before this step, once")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    main(asked.folder, asked.steps, asked.every, asked.fail_at)
