"""The page about reliability, made from the figures of every campaign.

python -m bench.reliability.page --page docs/reliability.md

A campaign is one JSON in bench/results, reliability_*.json, whose result has `campaign`, `cases`,
`held`, `refused`, `faults`, `broken` (each with `what`) and `minutes`; its `kinds`, if it has any,
say how often each was tried. What broke and was fixed is in `found`, with the test that keeps it
fixed. Long runs of tests are in long_tests*.json, see `bench.reliability.long_tests`. Mutants have
a JSON of their own, see `bench.reliability.mutants`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.reliability.found import FOUND

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
MUTANTS = "reliability_mutants.json"
# Files of tests that were run in full, and have another name by now; "" where there is none.
# A file that has only gone into a folder is found there.
RENAMED = {
    "tests/graph/test_matrix.py": "tests/graph/exactness/test_matrix.py",
    "tests/unit/test_harmony.py": "tests/unit/placement/test_harmony.py",
    "tests/unit/test_segments.py": "",
}


def page(
    campaigns: dict[str, dict[str, Any]],
    soak: dict[str, Any] | None,
    tests: dict[str, dict[str, Any]] | None = None,
    mutants: dict[str, dict[str, Any]] | None = None,
) -> str:
    """The page as Markdown; `campaigns` and `tests` are figures by the name of a file.

    `mutants` are figures by the name of a group of modules.
    """
    parts = (
        _head(campaigns),
        _totals(campaigns),
        _table(campaigns),
        _broken(campaigns),
        _soak(soak),
        _tests(tests or {}),
        _mutants(mutants or {}),
        _found(),
    )
    return "\n".join(line for part in parts for line in part)


def campaigns_in(results: Path) -> dict[str, dict[str, Any]]:
    """The results of all campaigns by the name of their file."""
    files = sorted(set(results.glob("reliability_*.json")) - {results / MUTANTS})
    return {file.name: _result(file) for file in files}


def long_tests_in(results: Path) -> dict[str, dict[str, Any]]:
    """The figures of all files of tests that were run in full."""
    found = [_result(file) for file in sorted(results.glob("long_tests*.json"))]
    return {name: figures for result in found for name, figures in result.items()}


def _result(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text())["result"]
    return result


def _head(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    cases = sum(result["cases"] for result in campaigns.values())
    broke = sum(len(result["broken"]) for result in campaigns.values())
    yield "# Reliability\n"
    yield "This page says what we did to break the program, and what happened. We ran random"
    yield "training programs, damaged files, failed ranks, and processes that were killed. Of"
    yield f"{cases:,} cases {broke} broke a promise. What they showed is listed below; a test now"
    yield "fails if a fault that was fixed comes back. Words such as *held* and *rehearsal* are"
    yield "explained below or in the [glossary](glossary.md).\n"
    yield "`python -m bench.reliability.page` makes this page from the JSON file of each"
    yield "campaign. Every case has a seed, so that you can run it again.\n"


# By how the names of a kind's files go on behind "reliability_".
KINDS = {
    "steps": "random programs",
    "api_sequences": "sequences of changes around a step",
    "rank_sequences": "sequences on several ranks",
    "matrix_of_ranks": "ways to share a step among ranks",
    "ranks": "ranks that fail",
    "idioms": "ways to write a step",
    "faults": "faults in a step",
    "delays": "delays in a step",
    "processes": "processes that were killed",
    "files": "damaged files",
}


def _totals(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    """All campaigns of a kind together, with how many of what broke is open."""
    yield "| what was tried | cases | held | refused in our words | broke | of these open |"
    yield "|---|---|---|---|---|---|"
    for prefix, kind in KINDS.items():
        of_kind = [r for file, r in campaigns.items() if file.startswith(f"reliability_{prefix}")]
        broken = [entry for result in of_kind for entry in result["broken"]]
        counts = [sum(r[key] for r in of_kind) for key in ("cases", "held", "refused")]
        counts += [len(broken), sum(entry.get("since", "open")[:4] == "open" for entry in broken)]
        yield f"| {kind} | " + " | ".join(f"{count:,}" for count in counts) + " |"
    yield ""


COUNTED = ("minutes", "cases", "held", "refused", "faults")


def _alike(campaigns: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Campaigns that tried the same, whatever was fixed between them, by what they tried."""
    alike: dict[str, dict[str, dict[str, Any]]] = {}
    for file, result in campaigns.items():
        alike.setdefault(result["campaign"].partition(" (")[0], {})[file] = result
    return alike


def _table(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| campaign | minutes | cases | held | refused in our words | faults | broke |"
    yield "|---|---|---|---|---|---|---|"
    for name, runs in _alike(campaigns).items():
        columns = (sum(result[key] for result in runs.values()) for key in COUNTED)
        cells = " | ".join(f"{value:,g}" for value in columns)
        files = ", ".join(f"[{n}](../bench/results/{file})" for n, file in enumerate(runs, 1))
        broke = sum(len(result["broken"]) for result in runs.values())
        yield f"| {name} ({files}) | {cells} | {broke} |"
    yield "\n*Faults* counts the cases in which something was made to fail. A training program"
    yield "*held* when all of this was true:\n"
    yield "- The placed step left the same bits as the captured step. Where fused or compiled"
    yield "  kernels run, it was within rounding."
    yield "- The captured step was within rounding of eager (from seed 80000 on, of eager with"
    yield "  bias corrections in float32)."
    yield "- No tier went over its budget, no tensor stayed alive, and there were no more"
    yield "  compiles than the documentation says.\n"
    yield "Some programs magnify rounding. For these, the tolerance is how far eager moves from"
    yield "itself when its parameters are rounded once more. *Refused in our words* means that"
    yield "the program was refused with a message of ours. A refusal changes no parameter.\n"


def _broken(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What nothing has been done about since; of the rest the files have each, by its seed."""
    for file, result in campaigns.items():
        for entry in result["broken"]:
            if "since" not in entry:
                seed = f", seed {entry['seed']}" if "seed" in entry else ""
                yield f"- broke in {file}{seed}: {entry['what']}"
    yield "\n*A schedule with random delays*: in three steps, a third of all tasks start late,"
    yield "are waited for late or begin late, and memory holds NaN until it is written. The"
    yield "steps must leave the same bits as the graph without a plan. *A signal to a process*:"
    yield "the checkpoint on disk must be a state of the undisturbed run, to the bit, and the"
    yield "next process must continue from it. The files say how often each kind was tried."


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
    yield "\n*Allocated* is what the C library has given out, *resident* what the process has."
    yield "The run turns off glibc's caches for each thread: they count as given out and fill"
    yield "up for thousands of steps, 10 to 15 bytes a step in this run, and the program cannot"
    yield "empty them."


def _tests(tests: dict[str, dict[str, Any]]) -> Iterator[str]:
    if not tests:
        return
    yield "\n## Tests in full\n"
    yield "Files of tests that were run with all their long cases, and with 2,000 examples for each"
    yield "test of hypothesis, by `python -m bench.reliability.long_tests`.\n"
    yield "| file | tests | examples | skipped | failed | minutes |"
    yield "|---|---|---|---|---|---|"
    for name, figures in tests.items():
        keys = ("tests", "examples", "skipped")
        cells = " | ".join(f"{figures[key]:,}" for key in keys)
        file, failed = _as_it_is_now(name), len(figures["failed"])
        yield f"| {file} | {cells} | {failed} | {figures['minutes']} |"
    for name, figures in tests.items():
        yield from (f"- failed in {_as_it_is_now(name)}: {test}" for test in figures["failed"])


def _as_it_is_now(name: str) -> str:
    """The file of tests that was called `name` in words: where it is now, or that it is gone."""
    folder, _, file = name.rpartition("/")
    now = RENAMED.get(name, name)
    if now and not (ROOT / now).exists():
        (found,) = (ROOT / folder).rglob(file)
        now = found.relative_to(ROOT).as_posix()
    return f"`{now}`" if now else f"{file.removesuffix('.py')}, replaced since"


def _mutants(mutants: dict[str, dict[str, Any]]) -> Iterator[str]:
    if not mutants:
        return
    yield "\n## Programs that are wrong on purpose\n"
    yield "Do the tests see it when the program is wrong? The source is changed in one place: a"
    yield "comparison, a sign, a constant, a condition, two arguments, or a statement that is left"
    yield "out. Such a *mutant* is killed when a test fails or hangs. A random sample of all is run"
    yield f"by `python -m bench.reliability.mutants` ([JSON](../bench/results/{MUTANTS})). One that"
    yield "survives computes the same, for the reason given, or is open: a hole, until a test sees"
    yield "it. Tests were written for some that survived, so that a new sample may find more open"
    yield "than these, which have met the tests of today.\n"
    yield "| modules | mutants | run | killed | the same | open | killed of those that differ |"
    yield "|---|---|---|---|---|---|---|"
    for name, figures in mutants.items():
        still = figures["run"] - figures["killed"] - figures["equivalent"]
        share = figures["killed"] / max(1, figures["run"] - figures["equivalent"])
        cells = " | ".join(str(figures[key]) for key in ("mutants", "run", "killed", "equivalent"))
        yield f"| {name} | {cells} | {still} | {share:.0%} |"
    yield ""
    for figures in mutants.values():
        for each in figures["survived"]:
            because = each["because"] or "open, none of the tests that were run sees it"
            yield f"- `{' '.join(each['what'].split())}`: {because}"


def _found() -> Iterator[str]:
    yield "\n## What broke, and is fixed\n"
    for item in FOUND:
        yield f"- {item.what} (`{item.test}`)"
    yield ""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, required=True)
    asked = parser.parse_args()
    soak = _result(RESULTS / "soak.json")
    mutants = _result(RESULTS / MUTANTS) if (RESULTS / MUTANTS).exists() else {}
    text = page(campaigns_in(RESULTS), soak, long_tests_in(RESULTS), mutants)
    asked.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
