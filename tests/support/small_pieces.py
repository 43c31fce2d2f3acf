"""A quarter of the bytes that a drive moves at a time: tests of pieces and rooms need no more."""

from __future__ import annotations

import pytest

from cotrain_compile.placement.simulate import from_disk
from cotrain_compile.plan import on_disk
from cotrain_compile.runtime.disk import drive, resting_kernel, rooms


def make_small(patch: pytest.MonkeyPatch) -> None:
    for module in (on_disk, from_disk, drive, resting_kernel, rooms):
        patch.setattr(module, "PIECE_BYTES", 1 << 20)
