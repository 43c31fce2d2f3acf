"""The step of a rank that is made of the step of one device, against the step that is traced."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.cluster.ranks.rank_plan import in_micro_batches
from cotrain_compile.cluster.ranks.rank_step import replica_step, shard_step, with_typed_gradients
from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.entry.tracing import trace
from cotrain_compile.presets import find

RANKS = 4


class Block(nn.Module):
    """Two large parameters, above what goes with others, and four small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return made


def build(micro_batches: int, way: str = "") -> Any:
    model: nn.Module = nn.Sequential(Block(), nn.Linear(512, 8))
    if way == "shard":
        cotrain_compile.shard(model)
    replica = DistributedDataParallel(model) if way == "replica" else None
    model = replica or model
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for i in range(micro_batches):
            is_last = i + 1 == micro_batches
            with nullcontext() if replica is None or is_last else replica.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    own = model(x.chunk(micro_batches)[i])
                    loss = F.cross_entropy(own, y.chunk(micro_batches)[i])
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    count = 32 * micro_batches
    return step, (torch.randn(count, 512), torch.zeros(count, dtype=torch.int64))


def figures(step: Dataflow) -> dict[str, float]:
    costs = roofline(step, find("8xrtx4090"))
    alive = liveness(step).lifespans
    peak = max(
        sum(b.nbytes for b in step.buffers if alive[b.name].start <= i < alive[b.name].end)
        for i in range(len(step.ops))
    )
    sent = Counter[str]()
    for op in step.ops:
        if op.collective and op.collective.nbytes > 1000:  # not of norms and scalars
            sent[op.collective.kind] += op.collective.nbytes
    rests = step.total_bytes(Role.PARAM, Role.OPTIMIZER_STATE)
    return {"rests": rests, "peak": peak, "device_s": sum(costs.device_s.values()), **sent}


def test_ranks_that_are_made_of_one_device_are_as_those_that_are_traced() -> None:
    """In two micro-batches; a shard has all but the exchange of norms, and both have other buckets
    of what is small."""
    one = with_typed_gradients(trace(partial(build, 1)))
    made = {
        "shard": in_micro_batches(shard_step(one, RANKS), 2),
        "replica": replica_step(in_micro_batches(one, 2), RANKS),
    }
    for way, step in made.items():
        own, traced = figures(step), figures(trace(partial(build, 2, way), ranks=RANKS))
        device_s = (own.pop("device_s"), traced.pop("device_s"))
        assert device_s[0] == pytest.approx(device_s[1], rel=0.1)
        assert own == pytest.approx(traced, rel=0.01)
