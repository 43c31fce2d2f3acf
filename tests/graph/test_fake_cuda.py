"""A step for a card, on a machine without one: traced, planned, rewritten and cut into segments.

The card is `tests/fake_cuda`: a library of ours that makes torch believe in one. It is loaded
before torch, so the steps run in a process of their own, the same one for all stories here.
`python -m bench.fake_cuda_matrix` runs many more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.library import compiler, library

ROOT = Path(__file__).parents[2]
POLICIES = ("resident", "zero-offload", "streamed", "auto")
# Every precision, every kernel of attention, and both ways to accumulate.
KINDS: tuple[dict[str, Any], ...] = (
    {"precision": "float32", "attention": "math"},
    {"precision": "bfloat16 weights", "attention": "flash"},
    {"precision": "bfloat16 autocast", "attention": "efficient", "micro_batches": 2},
    {"precision": "float16 scaled", "attention": "cudnn"},
)
TRAININGS = ("readme", "every optimizer", "llama")

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def results_of(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What came of each cell, in one process that has the fake card."""
    library()  # a failure to build it is told here
    run = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda"],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], dict[str, Any]]:
    """By precision or training, and policy."""
    trainings = [{"training": name} for name in TRAININGS]
    cells = [{**c, "policy": policy} for c in (*trainings, *KINDS) for policy in POLICIES]
    keys = [(str(c.get("precision", c.get("training"))), str(c["policy"])) for c in cells]
    return dict(zip(keys, results_of(cells), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*TRAININGS, *(str(kind["precision"]) for kind in KINDS)])
def test_a_step_for_a_card_goes_through_to_its_segments(
    results: Mapping[tuple[str, str], dict[str, Any]], name: str, policy: str
) -> None:
    found = results[name, policy]
    assert not found["error"], found["error"]
    assert found["segments"]
    assert (found["tasks"] > 0) == (policy != "resident")
