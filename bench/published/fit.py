"""Fit: how many times its roofline each class of op takes, by what others have published.

    python -m bench.published.fit [--rows ROWS.json] [--kept] [--write]

Traces each row's step (timm has to be installed for those of images), fits the constants on the
open rows, and prints how far predictions are off: as fitted, with a family left out, and with a
card left out. Of steps that were measured here the seconds of kernels are fitted by kind; how far
off their whole steps are is told apart, since these contain the host's time as well. With `--rows`
of another file nothing is fitted: the law that the product has is held against it. `--write` writes
`bench/results/published_steps.json` and its picture. With `--kept` the seconds by class of a row
are those that the last report has, where it has the row: nothing else is traced. So what changed in
the law is seen in seconds; what changed in how a step is traced or costed is not.

The law: the seconds of a step are the sum over its kinds of work of their roofline seconds, each
times the constants of its kind and card (`presets.factors.constants_of`), and the update. The
constants minimise the squares of the logarithms of predicted over published, with a pull of `PULL`
of a row towards 1 for each, by Gauss and Newton; what is off by more than `FAR` counts less.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.published.features import Feature, feature_of, machine_of
from bench.published.table import draw
from bench.report import write_report
from cotrain_compile.presets.factors import CONSTANTS

ROWS = Path("bench/published/rows.json")
RESULT = Path("bench/results/published_steps.json")

HELD = "a family left out"

PULL = 0.25
FAR = 0.1
ROUNDS = 40

Law = Mapping[str, float]


def fitted(features: Sequence[Feature]) -> dict[str, float]:
    """The constants that bring `features` nearest to what was published."""
    names = sorted({name for f in features for _, names in f.parts for name in names})
    logs = np.zeros(len(names))
    for _ in range(ROUNDS):
        law = dict(zip(names, np.exp(logs), strict=True))
        rows = [_slopes(feature, law, names) for feature in features]
        slopes = np.vstack([*(slope for slope, _ in rows), PULL * np.eye(len(names))])
        off = np.concatenate([[log for _, log in rows], PULL * logs])
        weights = np.sqrt(np.minimum(1.0, FAR / np.maximum(np.abs(off), 1e-9)))
        change = np.linalg.lstsq(slopes * weights[:, None], -off * weights, rcond=None)[0]
        logs += np.clip(change, -0.5, 0.5)
    return {name: float(value) for name, value in zip(names, np.exp(logs), strict=True)}


def _slopes(feature: Feature, law: Law, names: Sequence[str]) -> tuple[Any, float]:
    """How the logarithm of predicted over published changes with that of each constant; and it."""
    predicted_s = feature.predicted_s(law)
    slope = np.zeros(len(names))
    for seconds, constants in feature.parts:
        share = seconds * math.prod(law[name] for name in constants) / predicted_s
        for name in constants:
            slope[names.index(name)] += share
    return slope, math.log(predicted_s / feature.measured_s)


def ratios(features: Sequence[Feature], law: Law) -> dict[str, float]:
    """Predicted over published, by row."""
    return {f.row["id"]: f.predicted_s(law) / f.measured_s for f in features}


def left_out(
    given: Sequence[Feature], group: Callable[[Feature], str], asked: Sequence[Feature]
) -> dict[str, float]:
    """Predicted over published of each row asked of, by a law fitted on what other groups give."""
    found: dict[str, float] = {}
    for name in sorted({group(f) for f in asked}):
        law = fitted([f for f in given if group(f) != name])
        found |= ratios([f for f in asked if group(f) == name], law)
    return found


def family(feature: Feature) -> str:
    """Of models: what is said of one of a family is no news of another."""
    return str(feature.row["family"]).removesuffix("-nhwc").removesuffix("-tf32")


def card(feature: Feature) -> str:
    """The preset."""
    return feature.machine


def told(found: Mapping[str, float]) -> dict[str, Any]:
    """How far off: the median, nine of ten, the worst, and how many are within 15 and 20 %."""
    off = sorted(abs(ratio - 1.0) for ratio in found.values())
    return {
        "rows": len(off),
        "median": round(median(off), 4),
        "nine of ten": round(off[math.ceil(0.9 * len(off)) - 1], 4),
        "worst": round(off[-1], 4),
        "within 15 %": sum(o <= 0.15 for o in off),
        "within 20 %": sum(o <= 0.20 for o in off),
    }


def features_in(path: Path, kept: Mapping[str, Mapping[str, float]]) -> list[Feature]:
    """Of all rows with seconds whose step is here; tells which are not. `kept` has some by row."""
    rows = json.loads(path.read_text())["rows"]
    found = []
    for row in rows:
        here = row["kind"] == "step" and "Offload" not in row["optimizer"]
        known = kept.get(row["id"])
        feature = None
        if known is not None:
            feature = Feature(row, machine_of(row).name, known)
        elif here:
            feature = feature_of(row)
        if feature is not None:
            found.append(feature)
        elif row["kind"] == "step" and row["step_ms"]:
            print(f"no step here for {row['id']}")
    return found


def kept_seconds() -> dict[str, dict[str, float]]:
    """Seconds by class of the rows of the last report."""
    rows = json.loads(RESULT.read_text())["result"]["rows"]
    return {row["id"]: {n: ms / 1e3 for n, ms in row["ms by class"].items()} for row in rows}


def range_of(found: Mapping[str, float]) -> tuple[float, float]:
    """Between which parts of what is predicted eight of ten rows lie, by predicted over published.

    From one row to the next it goes evenly.
    """
    parts = sorted(1.0 / ratio for ratio in found.values())
    low, high = np.quantile(parts, (0.1, 0.9))
    return round(float(low), 2), round(float(high), 2)


def result_of(features: Sequence[Feature]) -> dict[str, Any]:
    """What the report says: constants, how far off they are by which check, and each row.

    `off` is of published steps, `off, own steps` and `off, own kernels` of what was measured here.
    """
    kernels = [kernel for f in features for kernel in f.kernels]
    given = [*(f for f in features if not f.is_own), *kernels]
    everything = [*features, *kernels]
    law = fitted(given)
    found = {
        "rates alone": ratios(everything, {}),
        "the product's constants": ratios(everything, CONSTANTS),
        "fitted on all": ratios(everything, law),
        HELD: left_out(given, family, everything),
        "a card left out": left_out(given, card, everything),
    }
    compiled = [f.row["id"] for f in features if f.row["compiled"] and not f.is_own]
    ranges = {
        "compiled": range_of({i: found[HELD][i] for i in compiled}),
        "eager": range_of(
            {
                f.row["id"]: found[HELD][f.row["id"]]
                for f in features
                if not f.row["compiled"] and not f.is_own
            }
        ),
    }
    groups = {
        "off": [f for f in features if not f.is_own],
        "off, own steps": [f for f in features if f.is_own],
        "off, own kernels": kernels,
    }
    return {
        "constants": {name: round(value, 3) for name, value in law.items()},
        "the product's constants": dict(CONSTANTS),
        "published over predicted, eight of ten": ranges,
        **{
            title: {
                name: told({f.row["id"]: by_row[f.row["id"]] for f in group})
                for name, by_row in found.items()
            }
            for title, group in groups.items()
        },
        "rows": [_shown(f, found) for f in features],
        "kernels": [_shown(f, found) for f in kernels],
    }


def _shown(feature: Feature, found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    row = feature.row
    return {
        "id": row["id"],
        "family": row["family"],
        "card": row["card"],
        "compiled": bool(row["compiled"]),
        "published_ms": row["step_ms"],
        "predicted over published": {
            name: round(by_row[row["id"]], 3)
            for name, by_row in found.items()
            if name != "fitted on all"
        },
        "ms by class": {name: round(1e3 * s, 2) for name, s in feature.seconds.items()},
    }


def main() -> None:
    """Fit, or hold another file's rows against the product's law."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    features = features_in(given.rows, kept_seconds() if given.kept else {})
    if given.rows != ROWS:
        found = ratios(features, CONSTANTS)
        print("\n".join(f"{name:44s} {ratio:.2f}" for name, ratio in found.items()))
        print(json.dumps(told(found), indent=1))
        return
    result = result_of(features)
    for row in (*result["rows"], *result["kernels"]):
        print(f"{row['id']:44s} {row['card'][:18]:18s}", *row["predicted over published"].values())
    told_of = [
        key for key in result if key == "constants" or key.startswith(("off", "published over"))
    ]
    print(json.dumps({key: result[key] for key in told_of}, indent=1))
    if given.write:
        question = "How far are predicted steps from published ones, by constants by class of op?"
        write_report(RESULT, question, result)
        draw(result)


if __name__ == "__main__":
    main()
