"""What pages about several cards tell a reader to type runs on two ranks.

`which_way.md`, `several_cards.md` and the second block of `from-fsdp2.md`; the plan of a cluster
stands for itself: what it would say of two ranks is in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import cotrain_compile
from cotrain_compile.cluster.model.layout import StagePlan
from tests.support.pages import ROOT, programs
from tests.support.ranks import Ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Model(nn.Module):
    """Two blocks, by both names that pages have for such."""

    def __init__(self, name: str = "blocks") -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList([Block(), Block()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.get_submodule(self.name).children():
            x = block(x)
        return x


@dataclass(frozen=True)
class OnRanks:
    """A block of a page, by number, and what stands for a plan or for cards."""

    page: str
    number: int
    changes: Mapping[str, str] = field(default_factory=dict)
    layers: str = "blocks"
    then: str = ""


PLAN = '"plan.json"'
STEP = """
optimizer = torch.optim.AdamW(model.parameters())
loss_fn(model(ids), target).backward()
cotrain_compile.clip_grad_norm(model.parameters(), 1.0)
optimizer.step()
"""
CASES = (
    OnRanks("docs/which_way.md", 0, {PLAN: '{"shard": 2}'}),
    OnRanks("docs/which_way.md", 1, {PLAN: "stages"}),
    OnRanks("docs/which_way.md", 2),
    OnRanks("docs/which_way.md", 3, {PLAN: '{"layers.0": 2, "layers.1": 1}'}, "layers"),
    OnRanks("docs/several_cards.md", 0, {'torch.distributed.init_process_group("nccl")\n': ""}),
    OnRanks("docs/several_cards.md", 1, {"cuda": "cpu", "(2, 4, 2)": "(1, 1, 2)"}, then=STEP),
    OnRanks("docs/tasks/from-fsdp2.md", 1, {"in model:": "in model.blocks:"}, then="step(ids)"),
)


def run(rank: int, case: OnRanks) -> bool:
    """Run the block on this rank; whether parameters are still numbers."""
    torch.manual_seed(0)
    model = Model(case.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, target = torch.randn(8, 8), torch.randint(8, (8,))
    text = programs(ROOT / case.page)[case.number]
    for there, here in case.changes.items():
        assert there in text, there
        text = text.replace(there, here)
    names: dict[str, Any] = {
        **{"torch": torch, "F": F, "cotrain_compile": cotrain_compile, "print": str},
        **{"model": model, "optimizer": optimizer, "loss_fn": F.cross_entropy, "device": "cpu"},
        **{"ids": ids, "target": target, "Model": lambda: model, "policy": MixedPrecisionPolicy()},
        **{"data": [(ids, target)] * 2, "batches": [(ids, target)] * 2},
        **{"fully_shard": fully_shard, "init_device_mesh": init_device_mesh},
        **{"parallelize_module": parallelize_module, "ColwiseParallel": ColwiseParallel},
        **{"RowwiseParallel": RowwiseParallel},
        "stages": StagePlan("1F1B", ("blocks.1",), 2, 4),
    }

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer = names["optimizer"]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), target)
        loss.backward()
        optimizer.step()
        return loss

    names["step"] = step
    exec(compile(text + case.then, case.page, "exec"), names)
    dist.barrier()
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.page} {case.number}")
def test_a_block_for_ranks_runs(case: OnRanks, two_ranks: Ranks) -> None:
    assert two_ranks.run(run, case) == [True, True]
