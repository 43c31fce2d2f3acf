"""The step of a rank that is made of the step of one device, against the step that is traced."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cotrain_compile
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.cluster.micro_batches import in_micro_batches
from cotrain_compile.cluster.rank_step import rank_step
from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.presets import find
from cotrain_compile.tracing import trace

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


def build(micro_batches: int, *, sharded: bool) -> Any:
    model = nn.ModuleDict({"layers": nn.Sequential(Block(), Block()), "head": nn.Linear(512, 8)})
    if sharded:
        cotrain_compile.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for own, target in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model["head"](model["layers"](own)), target)
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
        if op.collective and "all_reduce" not in op.collective.kind:
            sent[op.collective.kind] += op.collective.nbytes
    rests = step.total_bytes(Role.PARAM, Role.OPTIMIZER_STATE)
    return {"rests": rests, "peak": peak, "device_s": sum(costs.device_s.values()), **sent}


def test_a_rank_that_is_made_of_one_device_is_as_one_that_is_traced() -> None:
    """In two micro-batches; it has all but the exchange of norms, and other buckets of what is
    small."""
    one = trace(partial(build, 1, sharded=False))
    made = figures(in_micro_batches(rank_step(one, RANKS), 2))
    traced = figures(trace(partial(build, 2, sharded=True), ranks=RANKS))
    assert made.keys() == traced.keys()
    seconds = (made.pop("device_s"), traced.pop("device_s"))
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05)
    assert made == pytest.approx(traced, rel=0.01)
