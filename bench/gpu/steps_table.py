"""What `bench.gpu.steps` has measured on a card, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.results_page.tables import markdown
from cotrain_compile.support.units import format_bytes

_KINDS = ("product", "convolution", "attention", "memory")
_INTRODUCTION = """An NVIDIA H200, torch 2.11.0+cu130, 2026-11-26, in a quarter of an hour.
Seconds are medians of five steps, while others compiled on the same 16 cores. Predicted is by the
preset of that day, whose rates and factors have been fitted anew since
([decision 59](decisions/0059-seconds-by-kind.md)), then by a calibration of that day. A peak that
was measured has the gradients in it that the eager step before had left, 4 bytes each."""


def table(result: Mapping[str, Any]) -> str:
    """Steps as run and predicted, then the kernels of each, then what failed."""
    rows, failed = result["rows"], []
    for row in rows:
        if "error" in row and not row["error"].startswith("TimeoutError"):
            failed.append((row["step"], row["way"], row["error"].splitlines()[0][:140]))
    run = [row for row in rows if "measured_s" in row]
    steps = markdown(
        ("step", "way", "measured", "predicted", "calibrated", "peak", "predicted"),
        [
            (
                row["step"],
                row["way"],
                *(_ms(row.get(key)) for key in ("measured_s", "predicted_s", "calibrated_s")),
                *(_size(row.get(key)) for key in ("allocator_peak_bytes", "predicted_peak_bytes")),
            )
            for row in run
        ],
    )
    kernels = markdown(
        ("kernels of", "way", *(f"{kind}, ms" for kind in _KINDS), "sum, ms"),
        [_kernels(row) for row in run if "kernels" in row],
    )
    missing = markdown(("step", "way", "failed, and was mended after it"), failed)
    return "\n\n".join((_INTRODUCTION, steps, kernels, missing))


def _kernels(row: Mapping[str, Any]) -> tuple[str, ...]:
    each = [row["kernels"].get(kind, 0.0) for kind in _KINDS]
    return (row["step"], row["way"], *(f"{1e3 * s:.1f}" for s in (*each, sum(each))))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
