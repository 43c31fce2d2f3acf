"""Weights first: which of two products beside one another a captured step runs first."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.capture.aten import prepare
from cotrain_compile.capture.aten.weights_first import make_weight_gradients_first
from cotrain_compile.dataflow import Dataflow, Op
from tests.support.captured_steps import Captured, Training, captured_training, differences
from tests.support.steps import OPTIMIZERS, Case

WIDTH, HIDDEN = 16, 64


def make_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
    )


def training_of(rows: int) -> Training:
    def make_batch() -> tuple[Tensor]:
        return (torch.randn(rows, WIDTH),)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).pow(2).mean()  # type: ignore[no-any-return]

    return Training(Case(make_mlp, make_batch, loss_of), OPTIMIZERS["sgd"])


def products_of(dataflow: Dataflow, read: Op) -> Sequence[Op]:
    """The products of the backward beside one another of which the first or last reads `read`."""
    products = [op for op in dataflow.ops if op.target == "aten.mm.default"]
    (at,) = [n for n, op in enumerate(products) if read.writes[0] in op.reads]
    beside = [op for op in products if set(op.reads) & set(products[at].reads)]
    assert len(beside) == 2
    return beside


def inside(captured: Captured) -> Op:
    (gelu,) = [op for op in captured.dataflow.ops if op.target == "aten.gelu.default"]
    return gelu


def alive_beside_products(captured: Captured) -> int:
    """The most bytes alive at the two products that read what is inside."""
    dataflow = captured.dataflow
    products = products_of(dataflow, inside(captured))
    return max(liveness(dataflow).live_bytes[dataflow.position[op.name]] for op in products)


def trained(captured: Captured) -> list[Any]:
    return captured.train(lambda inputs: list(captured.step.module(*inputs)))


def test_a_weights_gradient_comes_first_where_that_frees_more_than_it_takes() -> None:
    captured = captured_training(training_of(rows=512))
    first, second = products_of(captured.dataflow, gelu := inside(captured))
    assert gelu.writes[0] in first.reads
    assert gelu.writes[0] not in second.reads


def test_it_comes_last_where_it_is_the_larger() -> None:
    captured = captured_training(training_of(rows=2))
    first, second = products_of(captured.dataflow, gelu := inside(captured))
    assert gelu.writes[0] in second.reads
    assert gelu.writes[0] not in first.reads


def test_less_is_alive_and_every_bit_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    now = captured_training(training_of(rows=512))
    others = tuple(p for p in prepare.PREPARATIONS if p is not make_weight_gradients_first)
    monkeypatch.setattr(prepare, "PREPARATIONS", others)
    before = captured_training(training_of(rows=512))
    assert {op.name for op in now.dataflow.ops} == {op.name for op in before.dataflow.ops}
    assert alive_beside_products(now) < alive_beside_products(before)
    assert not differences(trained(now), trained(before))
