"""The page about reliability, made from the figures of every campaign.

python -m bench.reliability.page --page docs/reliability.md

A campaign is one JSON in bench/results, reliability_*.json, whose result has `campaign`, `cases`,
`held`, `refused`, `faults`, `broken` (each with `what`) and `minutes`; its `kinds`, if it has any,
say how often each was tried. What broke and was fixed is in FOUND, with the test that keeps it
fixed. Long runs of tests are in long_tests*.json, see `bench.reliability.long_tests`. Mutants have
a JSON of their own, see `bench.reliability.mutants`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Found:
    """What a campaign has broken, and the test that fails where it comes back."""

    what: str
    test: str


FOUND = (
    Found(
        "Where all gradients are parts of one flat buffer, an update on the host took the first "
        "one of it for its own: wrong numbers, or a StepFailed in the middle of the update.",
        "tests/graph/exactness/test_sequences.py",
    ),
    Found(
        "A step whose loss needs no gradient, as under `torch.no_grad()`, ended in an error of "
        "Dynamo's.",
        "tests/graph/exactness/test_sequences.py",
    ),
    Found(
        "A step of changing sizes that copies into an input, or makes values whose sizes torch "
        "keeps as symbols in its updates, ended in a RuntimeError.",
        "tests/graph/capture/test_kernel_values.py",
    ),
    Found(
        "Where the peak of a step is in its updates, small ones in lock step took up to 9 % less "
        "of the device than was predicted.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "The graph of a step that was found on disk could not be called.",
        "tests/graph/capture/test_trace_cache.py",
    ),
    Found(
        "A rank of a pipeline with a batch of another size, or whose turn failed, raised alone, "
        "and the others waited for it until the timeout of their group.",
        "tests/graph/distribute/test_pipeline.py",
    ),
    Found(
        "An overlapping update that failed before its step returned was told by the next step "
        "alone, not by `synchronize()` nor when a `state_dict` was taken.",
        "tests/graph/runtime/test_overlap_contract.py",
    ),
    Found(
        "New values of a parameter with gaps between its elements lost its strides, and took "
        "other memory than was predicted.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "Updates of a layer at one place, with gradients that had been away: a KeyError.",
        "tests/unit/placement/test_layer_updates.py",
    ),
    Found(
        "A float64 parameter or state of no dimensions was not updated, without an error: Dynamo "
        "(torch 2.13) drops in-place ops on one when it traces again.",
        "tests/graph/capture/test_scalar_parameters.py",
    ),
    Found(
        "Two parameters that are parts of one storage got two updates of one name, and the plan "
        "was refused as unsound. They now stay on the device.",
        "tests/graph/extract/test_extract.py",
    ),
    Found(
        "A parameter that is part of a larger storage was planned with fewer bytes than it holds.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "A pipe, device or file of any size given as plan, step or machine was read for ever.",
        "tests/unit/data/test_fuzz_files.py",
    ),
    Found(
        "A plan that lacked a tier, named what its step has not, or had times below zero ended in "
        "a KeyError or ValueError of `show`, `diff`, `graph` or `explain`.",
        "tests/unit/data/test_fuzz_files.py",
    ),
    Found(
        "Options with numbers that no float holds, or that were no dictionary, ended in an "
        "OverflowError or AttributeError.",
        "tests/unit/data/test_fuzz_files.py",
    ),
    Found(
        "Where pulp could not be imported, `import cotrain_compile.compile` ended in a "
        "ModuleNotFoundError, and `autotm` policies without HiGHS in an error of pulp's.",
        "tests/unit/placement/test_without_solvers.py",
    ),
    Found(
        "A program whose solver was stopped before it had a bound was reported as without one; "
        "it is that of no time now, as for CBC.",
        "tests/unit/placement/test_solver_faults.py",
    ),
    Found(
        "A parameter without elements, beside a learning rate that changes: the rate, a tensor "
        "then, was taken for its gradient, and the plan was refused as unsound.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "One of two parameters in one storage was taken for frozen, to rest on the host though the "
        "step writes it, and the plan was refused as unsound.",
        "tests/unit/placement/test_strategies.py",
    ),
    Found(
        "A step compiled with Inductor took more of the device than its plan said, though no more "
        "than the budget. What its rehearsal took is told now, and no step exceeds that.",
        "tests/graph/backends/test_inductor.py",
    ),
    Found(
        "A step that was planned again after a rehearsal was held to what it was planned for, "
        "failed again, and was refused though it had room.",
        "tests/graph/backends/test_first_step.py",
    ),
    Found(
        "Where a value was made again for the backward, a view of it in the backward was taken for "
        "one of the forward's value: that was counted to there, and the new one was not.",
        "tests/graph/capture/test_rematerialise.py",
    ),
    Found(
        "Where autograd's copy of a gradient is left out, a view of the copy was counted beside "
        "the gradient that it shows.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "One of several results of an op, fetched before the step took it from the op, was kept "
        "beside its copy until then: out of memory in the budget that was planned.",
        "tests/graph/passes/test_rewrite.py",
    ),
    Found(
        "With Inductor and some segments in eager, a norm under autocast on the CPU made NaN: its "
        "statistics are float32, and compiled code read bfloat16, as the trace said.",
        "tests/graph/capture/test_kernel_values.py",
    ),
    Found(
        "Norms under autocast on the CPU, and writes into part of a tensor, took other memory than "
        "the trace said.",
        "tests/graph/capture/test_kernel_values.py",
    ),
    Found(
        "With Inductor on torch before 2.15, as in plain `torch.compile`, a loop could read what a "
        "scatter in it had yet to write: wrong numbers, without an error.",
        "tests/graph/backends/test_scatters.py",
    ),
    Found(
        "A float32 parameter with gaps in its memory was updated on the host by a fused loop that "
        "knows none: wrong numbers. The comparison with the captured ops was made without gaps.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "With Inductor, a step that returns a number failed with an AttributeError.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "A low-precision copy that the step reads once, some ops after it is made, was to be "
        "fetched twice, and the plan was refused as unsound.",
        "tests/graph/exactness/test_fuzz_steps.py",
    ),
    Found(
        "Policy `ilp` alone, near the least budget that would do, was refused for a limit of time "
        "that was not reached, though there is a plan.",
        "tests/unit/placement/test_solve.py",
    ),
    Found(
        "What a plan lacked on the host was taken off the device's budget when it was looked for "
        "again: `ilp`, `lp-round` and `greedy` were refused though there is a plan.",
        "tests/unit/placement/test_solve.py",
    ),
    Found(
        "A view that was made for an update moved to an earlier place kept a gradient on the "
        "device beside its fetched copy.",
        "tests/graph/passes/test_races.py",
    ),
    Found(
        "A whole number that a script counts as a global was a constant of the trace: the numbers "
        "were right, but the step was compiled in every call.",
        "tests/graph/capture/test_scripts.py",
    ),
    Found(
        "With Inductor, a step that computes with a whole number that changes ended in a KeyError.",
        "tests/graph/capture/test_recompiles.py",
    ),
    Found(
        "A step that counts in its closure (`nonlocal`) was not found by `inspect`.",
        "tests/graph/capture/test_recompiles.py",
    ),
    Found(
        "An optimizer that counts its steps in an attribute of its own never counted.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "Second derivatives through an `autograd.Function`, or through `p.grad` after "
        "`backward(create_graph=True)`, were zero.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "A gradient that a step returned, or kept in a list, was None.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "One tensor as the gradient of two parameters was clipped once, and a full `deque` counted "
        "one item too many.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "A layer that was replaced between calls and put back was not trained any more.",
        "tests/graph/capture/test_as_eager.py",
    ),
    Found(
        "What an optimizer makes by `eye` or `zeros` in its first step came with an update to "
        "behind other ops that read it, and the plan was refused as unsound.",
        "tests/unit/placement/test_unusual_steps.py",
    ),
    Found(
        "A value of the forward was planned both away and made again: unsound.",
        "tests/unit/placement/test_unusual_steps.py",
    ),
    Found(
        "Names from a file reached the terminal with the commands in them.",
        "tests/unit/data/test_fuzz_files.py",
    ),
)


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
        _table(campaigns),
        _broken(campaigns),
        _kinds(campaigns),
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
    yield f"{cases:,} cases {broke} broke a promise. Each of them is listed below with its"
    yield "reason; a test now fails if a fault that was fixed comes back. Words such as *held*"
    yield "and *rehearsal* are explained below or in the [glossary](glossary.md).\n"
    yield "`python -m bench.reliability.page` makes this page from the JSON file of each"
    yield "campaign. Every case has a seed, so that you can run it again.\n"


def _table(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| campaign | minutes | cases | held | refused in our words | faults | broke |"
    yield "|---|---|---|---|---|---|---|"
    for file, result in campaigns.items():
        columns = (result[key] for key in ("minutes", "cases", "held", "refused", "faults"))
        cells = " | ".join(str(value) for value in columns)
        name = f"[{result['campaign']}](../bench/results/{file})"
        yield f"| {name} | {cells} | {len(result['broken'])} |"
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
    for file, result in campaigns.items():
        for entry in result["broken"]:
            seed = f", seed {entry['seed']}" if "seed" in entry else ""
            then = f"; {entry['since']}" if "since" in entry else ""
            yield f"- broke in {file}{seed}: {entry['what']}{then}"


def _kinds(campaigns: dict[str, dict[str, Any]]) -> Iterator[str]:
    tried = [(name, kinds) for name, result in campaigns.items() if (kinds := result.get("kinds"))]
    if not tried:
        return
    yield "\n## What was tried how often\n"
    yield "| campaign | kind | cases |"
    yield "|---|---|---|"
    for name, kinds in tried:
        yield from (f"| {name} | {kind} | {number:,} |" for kind, number in sorted(kinds.items()))
    yield "*A schedule with random delays*: in three steps, a third of all tasks start late,"
    yield "are waited for late or begin late, and memory holds NaN until it is written. The"
    yield "steps must leave the same bits as the graph without a plan. *A signal to a process*:"
    yield "the checkpoint on disk must be a state of the undisturbed run, to the bit, and the"
    yield "next process must continue from it."


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
