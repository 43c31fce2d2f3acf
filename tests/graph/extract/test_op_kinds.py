"""What kind of work each op of a traced step is, and in which precision a card does it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cotrain_compile
from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.machine.op_classes import OpKind
from tests.support.fresh_process import run_fresh


def traced(*, last: bool = False, precision: str = "highest", card: bool = True) -> Dataflow:
    return _kept(last, precision, card)


@functools.cache
def _kept(last: bool, precision: str, card: bool) -> Dataflow:
    return run_fresh(_traced, last, precision, card) if card else _traced(last, precision, card)


def _traced(last: bool, precision: str, card: bool) -> Dataflow:
    """A net of a convolution, a depthwise one, batch norm and a linear layer, for an A100."""

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.set_float32_matmul_precision(precision)  # in the copy of this process that traces
        net: Any = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 16, 1),
            nn.Flatten(),
            nn.Linear(16 * 64, 4),
        )
        form = torch.channels_last if last else torch.contiguous_format
        net.to(memory_format=form)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = torch.softmax(net(x), -1).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.randn(2, 8, 8, 8).contiguous(memory_format=form),)

    return cotrain_compile.trace(build, machine="a100-80" if card else None)


def ops_of(step: Dataflow, name: str) -> list[Op]:
    return [op for op in step.ops if op.target.startswith(f"aten.{name}.")]


@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_is_known_by_its_layout_and_its_filters(last: bool) -> None:
    dense = OpKind.CHANNELS_LAST if last else OpKind.CONVOLUTION
    step = traced(last=last)
    for name in ("convolution", "convolution_backward"):
        kinds = [op.kind for op in ops_of(step, name)]
        assert sorted(kinds) == sorted([dense, OpKind.DEPTHWISE, dense])


def test_other_ops_are_known_by_what_they_do() -> None:
    step = traced()
    of = {name: ops_of(step, name)[0].kind for name in ("relu", "addmm", "_softmax", "mean")}
    assert of == {
        "relu": OpKind.POINTWISE,
        "addmm": OpKind.PRODUCT,
        "_softmax": OpKind.NORM,
        "mean": OpKind.REDUCTION,
    }
    assert all(op.kind is OpKind.UNSAID for op in step.ops if not op.bytes_moved)


@pytest.mark.parametrize(("precision", "dtype"), [("highest", "float32"), ("high", "tfloat32")])
def test_a_card_cuts_float32_where_the_switches_of_torch_say_so(precision: str, dtype: str) -> None:
    """Convolutions are cut unless told otherwise, products where it was asked for."""
    step = traced(precision=precision)
    assert {op.dtype for op in ops_of(step, "convolution")} == {"tfloat32"}
    assert {op.dtype for op in ops_of(step, "addmm")} == {dtype}


def test_on_a_cpu_nothing_is_cut() -> None:
    assert {op.dtype for op in traced(card=False).ops if op.flops} == {"float32"}
