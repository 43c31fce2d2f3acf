"""Scratch of attention backwards is in the plan: a buffer that lives as long as its op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract import op_costs
from cotrain_compile.extract.extract import extract
from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.placed import place_dataflow
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.presets import find

ROWS, HEADS, LENGTH, WIDTH = 2, 2, 64, 8
ON_THE_HOST = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(query, key, value)


def attention() -> tuple[Any, tuple[Any, ...]]:
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.zeros(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.bfloat16),)


def test_the_sum_that_a_backward_keeps_in_float32_is_planned() -> None:
    step = trace_graph(attention)
    (node,) = step.module.graph.find_nodes(op="call_function", target=ON_THE_HOST)
    assert node.args[1].meta["val"].dtype == torch.bfloat16
    with mock.patch.object(op_costs, "_SUMS_IN_FLOAT32", {ON_THE_HOST}):
        dataflow = extract(step)
    (backward,) = [op for op in dataflow.ops if op.target == str(ON_THE_HOST)]
    (name,) = [name for name in backward.writes if name.endswith(".scratch")]
    scratch = dataflow.buffer[name]
    assert scratch.nbytes == ROWS * HEADS * LENGTH * WIDTH * 4
    problem = formulate(dataflow, find("h100"), dict.fromkeys(MEMORIES, 1 << 40))
    plan = schedule(problem, resident(dataflow))
    check(problem, plan)
    # It is there while the backward runs, and at no other op.
    more = [a - b for a, b in zip(planned(dataflow), planned(extract(step)), strict=True)]
    slots = [slot for slot, nbytes in enumerate(more) if nbytes]
    assert slots == [place_dataflow(dataflow, resident(dataflow)).program.slot[backward.name]]
    assert more[slots[0]] == scratch.nbytes


def planned(dataflow: Dataflow) -> Sequence[int]:
    """Bytes on the device in each slot of the resident step."""
    return place_dataflow(dataflow, resident(dataflow)).device_bytes
