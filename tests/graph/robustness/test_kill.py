"""A run killed in the middle of an update goes on from its last checkpoint, to the bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from bench.reliability.killed_training import EXAMPLE, load_example

# The first of the two updates of the sixth step never returns.
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from cotrain_compile.runtime.emulated import EmulatedDevice
from tests.graph.robustness.test_kill import small_example

run_region, calls = EmulatedDevice.run_region, []

def run_and_die(*arguments):
    calls.append(run_region(*arguments))
    if len(calls) == 5 * 2 + 1:
        os.kill(os.getpid(), signal.SIGKILL)

EmulatedDevice.run_region = run_and_die
small_example().train(Path(sys.argv[1]), 8)
"""


def small_example() -> Any:
    """The example, with a model of one layer."""
    example: Any = load_example()
    example.make_model = lambda: nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.1))
    return example


@pytest.fixture(scope="module")
def example() -> ModuleType:
    found: ModuleType = small_example()
    return found


def test_a_killed_run_goes_on_from_its_last_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed.pt", tmp_path / "whole.pt"
    command = [sys.executable, "-c", KILLED_RUN, str(killed)]
    run = subprocess.run(command, cwd=EXAMPLE.parents[2], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert torch.load(killed)["done"] == 4
    losses = example.train(whole, 8)
    torch._dynamo.reset()
    assert example.train(killed, 8) == losses[4:]
    left, right = torch.load(killed), torch.load(whole)
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    parts = {"model": example.make_model()}
    example.save_checkpoint(path, parts, 2)

    class Killed(BaseException):
        pass

    def write_half(saved: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise Killed

    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(Killed):
        example.save_checkpoint(path, parts, 4)
    assert example.load_checkpoint(path, parts) == 2
