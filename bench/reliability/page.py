"""The page about reliability, made from the figures of every campaign.

python -m bench.reliability.page --page docs/reliability.md

A campaign is one JSON in bench/results, reliability_*.json, whose result has `campaign`, `cases`,
`held`, `refused`, `faults`, `broken` (each with `what`) and `minutes`; its `kinds`, if it has any,
say how often each was tried; of several that are counted together `runs` has what each was. What
broke and was fixed is in `found`, with the test that keeps it fixed. Long runs of tests are in
long_tests*.json, see `bench.reliability.long_tests`. Mutants have a JSON of their own, see
`bench.reliability.mutants`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
MUTANTS = "reliability_mutants.json"


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
        _broken(campaigns),
        _soak(soak),
        _tests(tests or {}),
        _mutants(mutants or {}),
        _not_promised(),
    )
    return "\n".join(line for part in parts for line in part) + "\n"


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
    yield "What was done to break the program, and what happened. Of"
    yield f"{cases:,} cases {broke} broke a promise; each fault that was fixed has a test, named in"
    yield "`bench/reliability/found.py`. `python -m bench.reliability.page` makes this page from"
    yield "the campaigns' JSONs, `bench/results/reliability_*.json`. Every case has a seed.\n"


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
    yield "\nA training program *held* when the placed step left the same bits as the captured"
    yield "one (within rounding where fused kernels run), that one was within rounding of eager, no"
    yield "tier went over its budget, no tensor stayed alive, and nothing compiled more often than"
    yield "the documentation says. *Refused*: with a message of ours, and no parameter changed."
    yield "*Delays*: a third of all tasks start late or are waited for late, and memory holds NaN"
    yield "until it is written. *Killed*: the checkpoint is a state of the undisturbed run, to the"
    yield "bit, and the next process continues from it.\n"


def _broken(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What nothing has been done about since; of the rest the files have each, by its seed."""
    for file, result in campaigns.items():
        for entry in result["broken"]:
            if "since" not in entry:
                seed = f", seed {entry['seed']}" if "seed" in entry else ""
                yield f"- broke in {file}{seed}: {entry['what']}"


def _soak(soak: dict[str, Any] | None) -> Iterator[str]:
    if soak is None:
        return
    slopes = soak["slopes_per_step"]
    rows = ", ".join(map(str, soak["rows"]))
    grows = [slope["per_step"] for slope in slopes.values() if not slope["is_flat"]]
    yield "\n## A long run\n"
    yield f"{soak['steps']:,} steps ([JSON](../bench/results/soak.json)), batches of {rows} rows in"
    yield f"turn, {soak['checkpoints']} checkpoints saved and loaded, {soak['evaluations']}"
    yield f"evaluations, {soak['graphs']} graphs. Losses differ from eager's by"
    yield f"{soak['largest_difference_of_losses']:.1g} at most, parameters by"
    yield f"{soak['largest_difference_of_parameters']:.1g}. Of {len(slopes)} counts of memory"
    yield f"{len(slopes) - len(grows)} are flat in the second half; the others grow by at most"
    yield f"{max(grows, default=0):.2g} bytes a step. A step took"
    yield f"{soak['last_fifth_over_second']:.2f} times the processor time in the last fifth as in"
    yield "the second."


def _tests(tests: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Files of tests that were run with all long cases and many examples, together."""
    if not tests:
        return
    counted, examples = (sum(f[key] for f in tests.values()) for key in ("tests", "examples"))
    yield "\n## Tests in full\n"
    yield f"{len(tests)} files of tests with all their long cases, by"
    yield f"`python -m bench.reliability.long_tests`: {counted:,} tests, {examples:,} examples of"
    yield f"hypothesis, {sum(len(f['failed']) for f in tests.values())} failed."
    for name, figures in tests.items():
        yield from (f"- failed in `{name}`: {test}" for test in figures["failed"])


def _mutants(mutants: dict[str, dict[str, Any]]) -> Iterator[str]:
    if not mutants:
        return
    yield "\n## Programs that are wrong on purpose\n"
    yield "The source is changed in one place: a comparison, a sign, a constant, a statement left"
    yield "out. Such a *mutant* is killed when a test fails or hangs. A random sample is run by"
    yield f"`python -m bench.reliability.mutants` ([JSON](../bench/results/{MUTANTS}), which has"
    yield "why each survivor computes the same). Tests were written for some that survived.\n"
    yield "| modules | mutants | run | killed | the same | open | killed of those that differ |"
    yield "|---|---|---|---|---|---|---|"
    for name, figures in mutants.items():
        still = figures["run"] - figures["killed"] - figures["equivalent"]
        share = figures["killed"] / max(1, figures["run"] - figures["equivalent"])
        cells = " | ".join(str(figures[key]) for key in ("mutants", "run", "killed", "equivalent"))
        yield f"| {name} | {cells} | {still} | {share:.0%} |"


def _not_promised() -> Iterator[str]:
    yield """
## What is not promised

- Eager's bits. A captured step is within [rounding](architecture.md#exactness) of it, and where a
  rounding decides what comes next (a comparison, a top-k, `F.rrelu`), goes on from there.
- A whole step behind a signal that is not [held](training.md), as SIGALRM: a handler that raises
  may end an update in the middle, which is told, and later calls are refused.
- That ranks notice everything: [not compared](several_cards.md#are-replicas-the-same) are buffers,
  optimizer states, tensors that the step gets, and parts of one rank alone.
- Budgets for memory that no op of torch's asks for, such as a library's own.
- The same of a card: campaigns ran on the emulated device. What a card has shown is on
  [its page](first-card.md#what-one-card-has-shown).
- What the generators cannot draw, and [the matrix](matrix.md) does not have."""


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
