"""Calibrations in tests: the constants of ops, which take seconds whatever the sizes, once."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from cotrain_compile.machine import TierSpec
from cotrain_compile.runtime.calibrate.link_bench import CpuBench, Sizes
from cotrain_compile.runtime.calibrate.op_constants import Constants, constants_of

# The package's attribute of that name is the function.
calibrate_module = importlib.import_module("cotrain_compile.runtime.calibrate.calibrate")


@functools.cache
def constants() -> Constants:
    """Of this computer, of one round, beside rates that it may have."""
    tier = TierSpec(1 << 30, 1e10, dict.fromkeys(("float32", "bfloat16", "float64"), 1e11), 1e-6)
    return constants_of(CpuBench(1 << 30), tier, torch.device("cpu"), Sizes(until_s=0.0))


def with_constants_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calibration has the same constants, and measures all else."""
    monkeypatch.setattr(calibrate_module, "constants_of", lambda *_: constants())
