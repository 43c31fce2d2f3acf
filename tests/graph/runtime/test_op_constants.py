"""Op constants: a processor on which each class has a known start and factor has those."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cotrain_compile.machine import TierSpec
from cotrain_compile.machine.op_classes import FACTORS, IN_A_ROW, VIEW
from cotrain_compile.runtime.calibrate import op_constants
from cotrain_compile.runtime.calibrate.link_bench import CpuBench, Sizes
from cotrain_compile.runtime.calibrate.op_constants import Taken, constants_of, line
from cotrain_compile.runtime.calibrate.op_pieces import (
    POOL_BYTES,
    OpCalls,
    Operands,
    memory_pieces,
    work_of,
)

CPU = torch.device("cpu")
TINY = Sizes(matmul_side=64, repeats=2)
TIER = TierSpec(1 << 30, 1e9, {"float32": 1e10, "bfloat16": 1e10, "float64": 1e10}, 1e-5)
PLAIN_S = 2e-6


def known_line(name: str) -> tuple[float, float]:
    """The start and the factor of a class, of pointwise ops `PLAIN_S` and 1."""
    number = 0 if name.partition(":")[0] == "pointwise" else 1 + FACTORS.index(name.split(":")[0])
    return PLAIN_S * (1 + number), 1.0 + number / 8


def found(monkeypatch: pytest.MonkeyPatch, fault: Callable[[str, float], float]) -> Any:
    """The constants of a processor with known lines, of which `fault` says what is told."""

    def turn_s(bench: object, piece: OpCalls, kept: deque[Any]) -> float:
        work = work_of(piece)
        start_s, factor = known_line(work.classes[0])
        taken_s = start_s + factor * op_constants._roofline_s(work, TIER)
        return fault(work.classes[0], taken_s)

    monkeypatch.setattr(op_constants, "_turn_s", turn_s)
    return constants_of(CpuBench(1 << 30), TIER, CPU, TINY)


def test_start_and_factor_of_each_class_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = found(monkeypatch, lambda name, taken_s: taken_s)
    assert not constants.remarks
    assert constants.starts_s.keys() == {*constants.factors, VIEW, IN_A_ROW}
    several = [name for name in constants.factors if "product" in name or "attention" in name]
    assert {"product", "product:bfloat16", "product:float64", "attention_backward"} <= {*several}
    for name in several:
        start_s, factor = known_line(name)
        assert constants.factors[name] == pytest.approx(factor, rel=1e-3), name
        assert constants.starts_s[name] == pytest.approx(TIER.launch_s + start_s, rel=0.3), name
    # Of one size alone nobody can tell a start from the rest.
    assert constants.starts_s["softmax"] == TIER.launch_s
    assert TierSpec(1, 1.0, {"float32": 1.0}, 0.0, constants.factors, constants.starts_s)


@pytest.mark.parametrize(
    "wrong", [*(pytest.param(n, marks=pytest.mark.long) for n in (0.0, math.inf, 1e6)), math.nan]
)
def test_a_class_that_no_device_can_have_measured_is_left_at_its_rates(
    monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    constants = found(monkeypatch, lambda name, s: wrong if name == "softmax" else s)
    assert "softmax" not in constants.factors
    assert "softmax" not in constants.starts_s
    assert "softmax_backward" in constants.factors
    assert [remark.partition(":")[0] for remark in constants.remarks] == ["softmax"]
    TierSpec(1, 1.0, {"float32": 1.0}, 0.0, constants.factors, constants.starts_s)


def test_a_line_weighs_small_calls_as_much_as_large_ones() -> None:
    points = [Taken(x, 3e-6 + 2 * x) for x in (1e-7, 1e-5, 1e-3)]
    assert line(points) == pytest.approx((3e-6, 2.0))
    assert line(points[:1]) == pytest.approx((0.0, points[0].seconds / 1e-7))
    below = [Taken(1.0, 1.0), Taken(2.0, 4.0)]
    start, factor = line(below)
    assert start == 0
    assert factor > 1


def test_each_piece_has_a_turn_in_every_round_until_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[Any] = []

    def turn_s(bench: object, piece: OpCalls, kept: deque[Any]) -> float:
        turns.append(piece)
        return 1.0

    monkeypatch.setattr(op_constants, "_turn_s", turn_s)
    pieces = [*memory_pieces(Operands(CPU, torch.float32), 64, 8)]
    bench = CpuBench(1 << 30)
    assert [*op_constants._seconds(bench, pieces, Sizes(repeats=3))] == [1] * len(pieces)
    assert [len([t for t in turns if t is piece]) for piece in pieces] == [3] * len(pieces)
    turns.clear()
    [*op_constants._seconds(bench, pieces, Sizes(repeats=3, until_s=0.0))]
    assert len(turns) == len(pieces)


def test_a_turn_calls_the_op_with_arguments_of_its_own_each_time() -> None:
    values, given = Operands(CPU, torch.float32), list[int]()

    def arguments() -> tuple[torch.Tensor]:
        x = values.cold(1 << 20)
        given.append(x.data_ptr())
        return (x,)

    kept: deque[Any] = deque(maxlen=8)
    bench = CpuBench(1 << 30)
    op_constants._turn_s(bench, OpCalls(torch.ops.aten.relu.default, arguments), kept)
    assert len({*given}) == len(given) == 1 + op_constants._CALLS
    assert len(kept) == op_constants._CALLS
    rounds = POOL_BYTES // (4 << 20)
    after = [values.cold(1 << 20).data_ptr() for _ in range(rounds)]
    assert len({*after}) == rounds  # none comes again before all of the pool has
