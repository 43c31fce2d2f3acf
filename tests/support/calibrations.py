"""Calibrations in tests: without the constants of ops, which take seconds whatever the sizes."""

from __future__ import annotations

import importlib

import pytest

from cotrain_compile.runtime.calibrate.op_constants import Constants

# The package's attribute of that name is the function.
calibrate_module = importlib.import_module("cotrain_compile.runtime.calibrate.calibrate")


def without_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calibration leaves all classes at their rates, and measures all else."""
    monkeypatch.setattr(calibrate_module, "constants_of", lambda *_: Constants({}, {}))
