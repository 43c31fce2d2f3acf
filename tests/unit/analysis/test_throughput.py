"""Throughput: an MFU is a share, or there is none and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis.throughput import throughput
from cotrain_compile.presets import find
from tests.support.dataflows import chain

MACHINE = find("rtx4090")
STEP = chain(2)
COMPUTING_S = sum(op.flops for op in STEP.ops) / MACHINE.device.flops_per_s_of("float32")


def test_mfu_is_the_share_of_the_step_that_its_flops_take() -> None:
    found = throughput(STEP, MACHINE, 4 * COMPUTING_S, tokens=8)
    assert found.mfu == pytest.approx(0.25)
    assert found.tokens_per_s == pytest.approx(8 / (4 * COMPUTING_S))
    assert not found.why_no_mfu


def test_more_than_a_whole_step_of_computing_is_no_mfu_but_a_wrong_rate() -> None:
    found = throughput(STEP, MACHINE, COMPUTING_S / 2, tokens=8)
    assert found.mfu is None
    assert "no MFU: at the rates of rtx4090" in found.why_no_mfu
    assert "Gflop/s in float32)" in found.why_no_mfu
    assert "calibrate" in found.why_no_mfu
    assert found.tokens_per_s == pytest.approx(16 / COMPUTING_S)


def test_a_rate_that_is_lent_from_another_dtype_is_told() -> None:
    step = replace(STEP, ops=tuple(replace(op, dtype="float8") for op in STEP.ops))
    found = throughput(step, MACHINE, COMPUTING_S / 9, tokens=8)
    assert "in float8, which is that of another dtype)" in found.why_no_mfu
