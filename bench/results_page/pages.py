"""The sentences of the pages in `docs` that quote figures, and what they say."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from bench.results_page.figure import Figure, Result


def percent(share: float, digits: int = 1) -> str:
    """A share as a number of percent."""
    return f"{100 * share:.{digits}f}"


def _upper(value: float) -> str:
    """The least number with one digit that is not below `value`: `1.3e-6` -> "2e-06"."""
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / unit) * unit:.0e}".replace("e-0", "e-")


def time_errors(r: Result) -> Sequence[str]:
    """By how many percent predicted times are off, in the median and at worst."""
    summary = r["summary"]
    return percent(summary["time_error_median"]), percent(summary["time_error_worst"])


def peak_errors(r: Result) -> Sequence[str]:
    """By how many bytes predicted peaks are off at worst, and of how many runs."""
    records = r["records"]
    worst = max(abs(x["predicted_peak_bytes"] - x["measured_peak_bytes"]) for x in records)
    return str(worst), str(len(records))


def _large_step(r: Result) -> Sequence[str]:
    return f"{r['capture_extract_analysis_s']:.0f}", f"{r['process_peak_bytes'] / 2**30:.1f}"


def _gaps(r: Result) -> Sequence[str]:
    gaps = sorted((row["gap"] for row in r["rows"] if row["gap"] is not None), reverse=True)
    return percent(statistics.median(gaps)), percent(gaps[0], 0), percent(gaps[1], 0)


def _solve_s(r: Result) -> Sequence[str]:
    target = r["summary"]["targets"]["solve_s"]
    return f"{target['median']:.1f}", f"{target['worst']:.1f}"


def _near_the_bound(r: Result) -> Sequence[str]:
    near = sum(row["gap"] is not None and row["gap"] < 0.1 for row in r["rows"])
    return str(near), str(r["summary"]["no_rule_fits"])


def processor_ratios(r: Result) -> Sequence[str]:
    """Processor time beside stock `torch.compile`'s, from the lowest."""
    return [f"{ratio:.2f}" for ratio in sorted(map(_processor_ratio, r.values()))]


def _processor_ratio(record: Result) -> float:
    sides: Mapping[str, Sequence[float]] = record["processor_s"]
    return statistics.median(sides["ours"]) / statistics.median(sides["stock"])


def _long_run(r: Result) -> Sequence[str]:
    return str(r["steps"]), percent(r["budget_bytes"] / r["resident_bytes"], 0)


def _resident_apart(r: Result) -> Sequence[str]:
    """How far steps are apart that differ in nothing but a link that they do not use."""
    seconds: dict[str, list[float]] = {}
    for x in r["records"]:
        if x["plan"] == "resident":
            seconds.setdefault(x["model"], []).append(x["measured_s"]["median"])
    return (percent(max(max(each) / min(each) - 1 for each in seconds.values())),)


def _cells(r: Result) -> Sequence[str]:
    count = Counter(cell["status"] for cell in r["cells"])
    return str(count["equal"]), str(len(r["cells"]))


def _rules(r: Result) -> Sequence[str]:
    return [str(len({x["plan"] for x in r["records"] if not x["plan"].startswith("auto")}))]


ANALYSIS, ARCHITECTURE, PLACEMENT = (
    "docs/analysis.md",
    "docs/architecture.md",
    "docs/placement.md",
)

FIGURES = (
    Figure(ANALYSIS, "runs three models with {} simple rules", "simulated_vs_measured", _rules),
    Figure(
        ANALYSIS,
        "the predicted step time differs from the measured one by {} % in the median, by {} % at "
        "worst, and by {} % at worst with the plans of `auto`",
        "simulated_vs_measured",
        lambda r: (*time_errors(r), percent(r["summary"]["time_error_auto_worst"])),
    ),
    Figure(
        ANALYSIS,
        "in the same rounds, differs from itself by up to {} %",
        "simulated_vs_measured",
        _resident_apart,
    ),
    Figure(
        ANALYSIS,
        "the predicted device peak is the metered one to within {} bytes in all {} runs",
        "simulated_vs_measured",
        peak_errors,
    ),
    Figure(
        ANALYSIS,
        "AdamW, clipping, {} ops) is captured",
        "large_step",
        lambda r: [f"{r['ops']:,}"],
    ),
    Figure(
        ANALYSIS,
        "is captured, extracted and analysed in {} s and {} GiB",
        "large_step",
        _large_step,
    ),
    Figure(
        ARCHITECTURE,
        "(`bench/training/loss_curves.py`) losses stay within {} of eager's",
        "loss_curves",
        lambda r: [_upper(max(r["largest_relative_difference"].values()))],
    ),
    Figure(
        ARCHITECTURE,
        "Over {} steps of a small model in {} % of its memory",
        "long_run",
        _long_run,
    ),
    Figure(
        ARCHITECTURE,
        "stay within {} of eager's (`bench/training/long_run.py`",
        "long_run",
        lambda r: [f"{r['largest_difference']:.2g}"],
    ),
    Figure(
        PLACEMENT, "| {} plans | median | worst |", "placement", lambda r: [str(len(r["rows"]))]
    ),
    Figure(PLACEMENT, "| above the certified bound | {} % | {} %, then {} % |", "placement", _gaps),
    Figure(PLACEMENT, "| time to solve | {} s | {} s |", "placement", _solve_s),
    Figure(
        PLACEMENT,
        "{} of them are within 10 % of their bound, none is below it; in {} no simple rule fits",
        "placement",
        _near_the_bound,
    ),
)
