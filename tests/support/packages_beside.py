"""Packages that some environments have: a test of them is skipped where they are missing."""

from __future__ import annotations

from typing import Any

import pytest


def module(name: str) -> Any:
    """The module `name`; the test is skipped where it is not installed."""
    return pytest.importorskip(name, reason=f"needs {name.partition('.')[0]}")
