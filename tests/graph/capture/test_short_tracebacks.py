"""A refusal is a few lines on the terminal: the user's call, and one message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
options = eval(sys.argv[1])

def step(x):
    loss = model(x).sum()
    loss.backward()
    if options.get("policy") == "greedy":
        print(loss)
    optimizer.step()
    optimizer.zero_grad()

step = torch.compile(step, backend="cotrain", options=options)
step(torch.randn(2, 4))
"""


def traceback_of(folder: Path, options: object, **environment: str) -> list[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, str(script), repr(options)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert result.returncode == 1
    return result.stderr.splitlines()


@pytest.mark.parametrize(
    ("options", "error", "call"),
    [
        ({"policy": "greedy"}, "CaptureError: ", "step(torch.randn(2, 4))"),
        ({"memory_budget": 100}, "PlacementError: ", "step(torch.randn(2, 4))"),
        ({"memory_buget": 100}, "OptionError: ", "step = torch.compile("),
    ],
)
def test_a_refusal_is_the_users_call_and_one_message(
    options: object, error: str, call: str, tmp_path: Path
) -> None:
    lines = traceback_of(tmp_path, options)
    assert lines[0] == "Traceback (most recent call last):"
    assert "train.py" in lines[1]
    assert call in lines[2]
    assert lines[-1].startswith(f"cotrain_compile.errors.{error}")
    # Nobody but the one who calls `torch.compile` could take its own frame away.
    frames = 3 if error.startswith("Option") else 2
    assert sum(line.lstrip().startswith("File ") for line in lines) == frames
    assert len(lines) <= 3 * frames + 2
    if error.startswith("Capture"):
        assert "train.py:14 in step: `print(loss)`" in lines[-1]


def test_torchs_own_switch_keeps_the_cause(tmp_path: Path) -> None:
    lines = traceback_of(tmp_path, {"policy": "greedy"}, TORCHDYNAMO_VERBOSE="1")
    assert "The above exception was the direct cause of the following exception:" in lines
    assert any(line.startswith("torch._dynamo.exc.Unsupported") for line in lines)
