"""Sharded training: a small model, trained a few steps on several ranks in one of many ways.

`train` runs a `Training` on this rank and returns what a test compares: losses, the parameters as
they would be on one rank, and the peak that was metered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cotrain_compile
from cotrain_compile.machine import Tier
from tests.support.closeness import relative_gap

SIZE, BATCH, STEPS = 12, 4, 3
# Ranks that share a layer where it is sharded, too.
TENSOR = 2
# Their powers are exact in float32, so that bias corrections agree, in whichever width.
SOFT_BETAS = (0.5, 0.75)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, size: int, bare: bool = False) -> None:
        super().__init__()
        self.norm = nn.Identity() if bare else nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size, bias=False)
        self.down = nn.Linear(4 * size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """A block between a layer and a head that share a weight, and a layer that is frozen.

    A `bare` one has matrices alone, and compiles in half the time.
    """

    def __init__(self, size: int = SIZE, bare: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(size, size, bias=not bare)
        self.block = Block(size, bare)
        self.frozen = nn.Linear(size, size, bias=False).requires_grad_(False)
        self.head = nn.Linear(size, size, bias=False)
        self.head.weight = self.first.weight
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        out: torch.Tensor = self.head(self.frozen(x))
        return out


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=SOFT_BETAS),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


@dataclass(frozen=True)
class Training:
    """How the model is trained.

    `model` is one of `MODELS`, `optimizer` of `OPTIMIZERS`, `way` "plain", "clipped",
    "clipped together" (also of tensors that torch clips apart), "accumulated", "autocast",
    "checkpointed" or "scaled" (by a GradScaler, where gradients of rank 1 alone overflow in the
    second step). Without `options` the step runs in eager. A `checkpointed` block makes its values
    again for the backward, a `bare` model has matrices alone.
    """

    model: str = "shard"
    way: str = "plain"
    optimizer: str = "sgd"
    options: Mapping[str, Any] | None = None
    size: int = SIZE
    checkpointed: bool = False
    bare: bool = False


@dataclass(frozen=True)
class Trained:
    """What came of it on one rank."""

    losses: tuple[float, ...]
    params: Mapping[str, torch.Tensor]
    predicted_peak: int = 0
    measured_peak: int = 0
    plan: Mapping[str, int] = field(default_factory=dict)


def furthest(found: Trained, expected: Trained) -> float:
    """The largest difference of a parameter, relative to its largest element."""
    return relative_gap(found.params, expected.params)


def train(rank: int, training: Training) -> Trained:
    """Train on this rank, on batches of its own."""
    torch.manual_seed(0)
    net = Net(training.size, training.bare)
    net.checkpointed = training.checkpointed or training.way == "checkpointed"
    model = MODELS[training.model](net)
    optimizer = OPTIMIZERS[training.optimizer]([p for p in model.parameters() if p.requires_grad])
    step: Any = step_of(model, optimizer, training.way)
    if training.options is not None:
        step = torch.compile(step, backend="cotrain", options={"quiet": True, **training.options})
    losses = tuple(float(step(*given)) for given in batches(training, rank))
    trained = Trained(losses, whole(model.state_dict()))
    return trained if training.options is None else _with_plan(trained, step)


def batches(training: Training, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What `rank` trains on."""
    found = [batch(number, rank, training.size) for number in range(STEPS)]
    if training.way == "scaled" and rank == 1:
        found[1][0][0, 0] = float("inf")
    return found


def part_of_batch(model: str, rank: int) -> int:
    """Whose batches `rank` trains on: those that share a layer have the same."""
    return {"tensor parallel": 0, "sharded tensor parallel": rank // TENSOR}.get(model, rank)


def batch(number: int, rank: int, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x, y = torch.randn(2, BATCH, size, generator=generator)
    return x, y


def whole(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of `tensors`, gathered from all ranks."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> Callable[..., Any]:
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return F.mse_loss(model(x).float(), y)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        parts = 2 if way == "accumulated" else 1
        total = torch.zeros(())
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = loss_of(part_x, part_y) / parts
            loss.backward()
            total = total + loss.detach()
        if way == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if way == "clipped together":
            cotrain_compile.clip_grad_norm(model.parameters(), 0.1)
        optimizer.step()
        return total

    return scaled if way == "scaled" else step


def _with_plan(trained: Trained, step: Any) -> Trained:
    placed = cotrain_compile.inspect(step)
    assert placed.measured is not None
    kinds = [type(task).__name__ for task in placed.plan.tasks]
    return Trained(
        trained.losses,
        trained.params,
        placed.predicted.peak_bytes[Tier.DEVICE],
        placed.measured.peak_bytes[Tier.DEVICE],
        {
            "transfers": kinds.count("Transfer"),
            "host updates": kinds.count("HostRegion"),
            "made again": len(placed.plan.placement.recomputed),
        },
    )


def fully_sharded(model: Net) -> nn.Module:
    fully_shard(model.block)
    fully_shard(model)
    return model


def _in_low_precision(model: Net) -> nn.Module:
    low, full = torch.bfloat16, torch.float32
    fully_shard(model.block, mp_policy=MixedPrecisionPolicy(low, reduce_dtype=full))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(low, reduce_dtype=full, output_dtype=full))
    return model


def _replicas() -> DeviceMesh:
    """Of one shard each, but for an even number of ranks above two, where each has two."""
    ranks = dist.get_world_size()
    shards = 2 if ranks > 2 and ranks % 2 == 0 else 1
    names = ("replicas", "shards")
    return init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=names)


def _tensor_parallel(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.block, mesh, split)
    return model


def _sharded_tensor_parallel(model: Net) -> nn.Module:
    """Each layer over two ranks, which have the same samples, and sharded over the others."""
    ranks = dist.get_world_size()
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (1, ranks // TENSOR, TENSOR), mesh_dim_names=names)
    split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.block, mesh["tensor"], split)
    fully_shard(model.block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return model


MODELS: Mapping[str, Callable[[Net], Any]] = {
    "ddp": DistributedDataParallel,
    "tensor parallel": _tensor_parallel,
    "sharded tensor parallel": _sharded_tensor_parallel,
    "shard": cotrain_compile.shard,
    "fully_shard": fully_sharded,
    "fully_shard in low precision": _in_low_precision,
    "replicas of shard": lambda model: cotrain_compile.shard(model, _replicas()),
    "replicas of fully_shard": lambda model: fully_shard(model, mesh=_replicas()),
}
