"""Values are summed over ranks once, and of what is scattered the parts alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import cotrain_compile
from cotrain_compile.dataflow import Phase
from tests.support.pipelines import loss_of
from tests.support.scaled_ranks import SPLITS, Language, samples_of


def test_a_layer_exchanges_twice_in_either_pass(rank_of_two: None) -> None:
    """As in Megatron-LM: one sum each behind, and for the gradient before, attention and MLP."""
    model = Language(attends=True)
    parallelize_module(model, init_device_mesh("cpu", (2,)), SPLITS["plain"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor, target: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(ids), target).backward()
        optimizer.step()

    compiled: Any = torch.compile(step, backend="cotrain", options={"quiet": True})
    compiled(*samples_of(0))
    ops = cotrain_compile.inspect(compiled).problem.dataflow.ops
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        found = Counter(op.collective.kind for op in ops if op.collective and op.phase is phase)
        assert found == {"all_reduce": 4}  # of two layers


def test_replicas_of_shards_sum_parts_of_gradients(rank_of_four: None) -> None:
    """A gradient is scattered within a row of the mesh, and half of it goes over the rows."""
    model = torch.nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    compiled: Any = torch.compile(step, backend="cotrain", options={"quiet": True})
    compiled(torch.randn(4, 8))
    ops = cotrain_compile.inspect(compiled).problem.dataflow.ops
    found = {op.collective.kind: op.collective.nbytes for op in ops if op.collective}
    whole = 4 * 8 * 8
    assert found == {
        "all_gather_into_tensor": whole,
        "reduce_scatter_tensor": whole,
        "all_reduce": whole // 2,
    }
