"""A refusal is a few lines on the terminal: the user's call, and one message."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import pytest
import torch._dynamo.config

SCRIPT = """
import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())

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


def traceback_of(folder: Path, options: object, text: str = SCRIPT) -> list[str]:
    """What Python prints where the script ends with an error."""
    script = folder / "train.py"
    script.write_text(text)
    linecache.checkcache(str(script))
    with pytest.raises(Exception) as failure:  # noqa: PT011
        exec(compile(text, str(script), "exec"), {"options": options})
    error = failure.value
    assert error.__traceback__ is not None
    # But for the frame of this test.
    told = traceback.TracebackException(type(error), error, error.__traceback__.tb_next)
    # lightning-fabric wraps `torch.compile` once another test has imported it.
    told.stack[:] = [frame for frame in told.stack if "lightning_fabric" not in frame.filename]
    return "".join(told.format()).splitlines()


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
        assert "train.py:12 in step: `print(loss)`" in lines[-1]


def test_torchs_own_switch_keeps_the_cause(tmp_path: Path) -> None:
    with torch._dynamo.config.patch(verbose=True):  # TORCHDYNAMO_VERBOSE=1
        lines = traceback_of(tmp_path, {"policy": "greedy"})
    assert "The above exception was the direct cause of the following exception:" in lines
    assert any(line.startswith("torch._dynamo.exc.Unsupported") for line in lines)


def test_shapes_that_do_not_match_are_the_line_and_one_message(tmp_path: Path) -> None:
    lines = traceback_of(tmp_path, {}, SCRIPT.replace("torch.randn(2, 4)", "torch.randn(2, 5)"))
    assert lines[-1].startswith("cotrain_compile.errors.CaptureError: ")
    assert "train.py:9 in step: `loss = model(x).sum()`: RuntimeError: a and b must" in lines[-1]
    assert len(lines) <= 8
