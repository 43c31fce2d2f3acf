"""The page about reliability, made from the figures of every campaign.

python -m bench.reliability --page docs/reliability.md

A campaign is one JSON in bench/results, reliability_*.json, whose result has `campaign`, `cases`,
`held`, `refused`, `faults`, `broken` (each with `what`) and `minutes`. What broke and was mended is
in FOUND, with the test that keeps it mended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Found:
    """What a campaign has broken, and the test that fails where it comes back."""

    what: str
    test: str


FOUND = (
    Found(
        "A float64 parameter or state of no dimensions was not updated, without an error: Dynamo "
        "(torch 2.13) drops in-place ops on one when it traces again.",
        "tests/graph/test_scalar_parameters.py",
    ),
    Found(
        "Two parameters that are parts of one storage got two updates of one name, and the plan "
        "was refused as unsound. They now stay on the device.",
        "tests/graph/test_extract.py",
    ),
    Found(
        "A parameter that is part of a larger storage was planned with fewer bytes than it holds.",
        "tests/graph/test_fuzz_steps.py",
    ),
    Found(
        "A pipe, device or file of any size given as plan, step or machine was read for ever.",
        "tests/unit/test_fuzz_files.py",
    ),
    Found(
        "A plan that lacked a tier, named what its step has not, or had times below zero ended in "
        "a KeyError or ValueError of `show`, `diff`, `graph` or `explain`.",
        "tests/unit/test_fuzz_files.py",
    ),
    Found(
        "Options with numbers that no float holds, or that were no dictionary, ended in an "
        "OverflowError or AttributeError.",
        "tests/unit/test_fuzz_files.py",
    ),
    Found(
        "Names from a file reached the terminal with the commands in them.",
        "tests/unit/test_fuzz_files.py",
    ),
)


def page(campaigns: dict[str, dict[str, Any]], soak: dict[str, Any] | None) -> str:
    """The page as Markdown; `campaigns` are results by the name of their file."""
    return "\n".join([*_head(), *_table(campaigns), *_broken(campaigns), *_soak(soak), *_found()])


def _head() -> Iterator[str]:
    yield "# Reliability\n"
    yield "What was tried to break it, and what came of it. Made by `python -m bench.reliability`"
    yield "from the JSON files of each campaign; every case has a seed and can be run again.\n"


def _table(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| campaign | minutes | cases | held | refused in our words | faults | broke |"
    yield "|---|---|---|---|---|---|---|"
    for file, result in campaigns.items():
        columns = (result[key] for key in ("minutes", "cases", "held", "refused", "faults"))
        cells = " | ".join(str(value) for value in columns)
        name = f"[{result['campaign']}](../bench/results/{file})"
        yield f"| {name} | {cells} | {len(result['broken'])} |"
    yield "\nA training program *held* when the placed step left the bits of the captured one (or"
    yield "is within rounding, where fused or compiled kernels run), the captured one is within"
    yield "rounding of eager, no tier was over its budget, no tensor stayed alive, and there were"
    yield "no more compiles than documented. A refusal changes nothing.\n"


def _broken(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    for file, result in campaigns.items():
        for entry in result["broken"]:
            seed = f", seed {entry['seed']}" if "seed" in entry else ""
            then = f"; {entry['since']}" if "since" in entry else ""
            yield f"- broke in {file}{seed}: {entry['what']}{then}"


def _soak(soak: dict[str, Any] | None) -> Iterator[str]:
    if soak is None:
        return
    slopes, growth = soak["slopes_per_step"], soak["growth_of_second_half"]
    rows = ", ".join(map(str, soak["rows"]))
    yield "\n## A long run\n"
    yield f"{soak['steps']:,} steps ([JSON](../bench/results/soak.json)), batches of {rows} rows in"
    yield f"turn, {soak['checkpoints']} checkpoints saved and loaded, {soak['evaluations']}"
    yield f"evaluations, {soak['graphs']} graphs. Losses differ from eager's by"
    yield f"{soak['largest_difference_of_losses']:.1g} at most, parameters by"
    yield f"{soak['largest_difference_of_parameters']:.1g}. A step took"
    yield f"{soak['last_fifth_over_second']:.2f} times the processor time in the last fifth as in"
    yield "the second.\n"
    yield "| second half of the run | growth | per step | standard error | flat |"
    yield "|---|---|---|---|---|"
    for name, slope in slopes.items():
        flat = "yes" if slope["is_flat"] else "no"
        numbers = f"{growth[name]:,} | {slope['per_step']:.3g} | {slope['error']:.2g}"
        yield f"| {name.replace('_', ' ')} | {numbers} | {flat} |"


def _found() -> Iterator[str]:
    yield "\n## What broke, and is mended\n"
    for item in FOUND:
        yield f"- {item.what} (`{item.test}`)"
    yield ""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, required=True)
    asked = parser.parse_args()
    files = sorted(RESULTS.glob("reliability_*.json"))
    campaigns = {file.name: json.loads(file.read_text())["result"] for file in files}
    soak = RESULTS / "soak.json"
    run = json.loads(soak.read_text())["result"] if soak.exists() else None
    asked.page.write_text(page(campaigns, run), encoding="utf-8")


if __name__ == "__main__":
    main()
