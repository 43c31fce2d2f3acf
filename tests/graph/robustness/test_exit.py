"""A process ends well with work in flight."""

from __future__ import annotations

import subprocess
import sys

import pytest

BUSY_AT_THE_END = """
import torch
from cotrain_compile.runtime.lanes import WorkerLane

lane, values = WorkerLane("host"), torch.ones(10_000_000)

def work():
    for _ in range(100):
        values.add_(1)
    print("worked to the end")

lane.submit("update.w", work, ())
"""


@pytest.mark.long
def test_work_in_flight_ends_before_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BUSY_AT_THE_END], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "worked to the end\n"
