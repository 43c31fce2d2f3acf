"""What `bench.gpu.steps` has measured on a card, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.results_page.tables import markdown
from cotrain_compile.support.units import format_bytes

_INTRODUCTION = """An NVIDIA H200, torch 2.11, medians of five steps while others compiled on the
same cores. Predicted is by what the first compile measured of that busy computer, calibrated by a
calibration before, alone. A measured peak includes gradients of the eager step before."""


def table(result: Mapping[str, Any]) -> str:
    """Steps as run and predicted."""
    return f"{_INTRODUCTION}\n\n" + markdown(
        ("step", "way", "measured", "predicted", "calibrated", "peak", "predicted"),
        [
            (
                row["step"],
                row["way"],
                *(_ms(row.get(key)) for key in ("measured_s", "predicted_s", "calibrated_s")),
                *(_size(row.get(key)) for key in ("allocator_peak_bytes", "predicted_peak_bytes")),
            )
            for row in result["rows"]
            if "measured_s" in row
        ],
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
