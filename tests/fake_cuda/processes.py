"""Cells run in a process of their own, one beside a card that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fake_cuda.library import library

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def results_of(
    cells: Sequence[Mapping[str, Any]], module: str = "tests.fake_cuda"
) -> list[dict[str, Any]]:
    """What came of each cell, in one process, that of `module`."""
    library()  # a failure to build it is told here
    run = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]
