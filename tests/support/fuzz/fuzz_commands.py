"""Commands over damaged files: a seed in; out comes whether the file was answered or refused.

The files are those of a real step: step.json, its plan, machine, measured timeline and profile.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from typer.testing import CliRunner

from cotrain_compile import files, presets
from cotrain_compile.cli.main import app
from cotrain_compile.errors import CotrainError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from tests.support.fuzz.fuzz_files import bent, damaged
from tests.support.nets import MIB, STEPS

STEP = STEPS["clipped"](3, MIB, 2 * MIB)
PROBLEM = formulate(STEP, presets.find("rtx4090"), {Tier.DEVICE: 20 * MIB, Tier.HOST: 1 << 30})
# Each worker makes it, when it collects tests.
PLAN = solve(PROBLEM, SolveSettings(work_limit=0.2))
TEXTS = {
    "step": files.to_json(STEP),
    "plan": files.to_json(PLAN),
    "machine": files.to_json(PROBLEM.machine),
    "timeline": files.to_json(PLAN.predicted).replace('"predicted"', '"measured"', 1),
    "profile": files.to_json(PROBLEM.costs),
}
SOLVE = "solve step.json -o out.json --machine machine.json --memory-budget 20MiB --policy greedy"
READERS = {
    "step": (
        "show step.json",
        "show plan.json",
        "analyze step.json --machine machine.json",
        "graph step.json --plan plan.json",
        "explain plan.json w0",
        "diff plan.json plan.json --step step.json",
        SOLVE,
    ),
    "plan": (
        "show plan.json --perfetto out.json",
        "show plan.json --html out.html",
        "graph step.json --plan plan.json",
        "explain plan.json w0",
        "diff plan.json plan.json",
    ),
    "machine": (
        "show machine.json",
        "analyze step.json --machine machine.json",
        "explain plan.json w0 --machine machine.json",
        SOLVE,
    ),
    "timeline": (
        "show timeline.json --perfetto out.json",
        "show plan.json --html out.html --measured timeline.json",
    ),
    "profile": ("explain plan.json w0 --profile profile.json",),
}
CASES = [(kind, command) for kind, commands in READERS.items() for command in commands]


# What a terminal obeys.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def with_files(folder: Path) -> Path:
    """`folder`, with every file as it should be."""
    for name, text in TEXTS.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def attempt(folder: Path, command: str) -> tuple[str, bool]:
    """The words of a command on files in `folder`, and whether they are a refusal of ours."""
    arguments = [str(folder / a) if "." in a else a for a in command.split()]
    result = CliRunner().invoke(app, arguments)
    if result.exception is None:
        return result.output, False
    if not isinstance(result.exception, CotrainError | OSError):
        raise result.exception
    return f"{result.output}{result.exception}", True


def run(folder: Path, command: str) -> str:
    """The words of `attempt`."""
    return attempt(folder, command)[0]


def case(folder: Path, seed: int) -> str:
    """Read a damaged file by a command that reads it: "answered" or "refused".

    Raises what is not an error of ours, and AssertionError for words that a terminal would obey.
    """
    rng = random.Random(seed)
    kind, command = rng.choice(CASES)
    file = folder / f"{kind}.json"
    file.write_bytes(rng.choice([bent, bent, damaged])(TEXTS[kind], rng))
    try:
        said, is_refused = attempt(folder, command)
    finally:
        file.write_text(TEXTS[kind])
    assert not CONTROL.search(said)
    return "refused" if is_refused else "answered"
