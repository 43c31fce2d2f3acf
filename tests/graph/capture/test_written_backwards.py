"""The backward that a user writes for a `torch.autograd.Function` is of the step's backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.dataflow import Phase
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.placement.recompute.recomputable import recomputable


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y + grad * x * x.cos()


def build() -> Any:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = last(Sine.apply(first(x))).square().mean()  # type: ignore[no-untyped-call]
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.randn(4, 8),)


# Dynamo itself makes an object of the class, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_it_does_is_backward_and_what_it_reads_can_be_made_again() -> None:
    dataflow = extract(trace_graph(build))
    (sine,) = (op for op in dataflow.ops if op.target == "aten.sin.default")
    (cosine,) = (op for op in dataflow.ops if op.target == "aten.cos.default")
    assert sine.phase is Phase.FORWARD
    assert cosine.phase is Phase.BACKWARD
    # Read by nothing of the forward behind the function: kept for what is written there alone.
    assert sine.writes[0] in recomputable(dataflow)
    readers = [op.phase for op in dataflow.ops if sine.writes[0] in op.reads]
    assert Phase.BACKWARD in readers
