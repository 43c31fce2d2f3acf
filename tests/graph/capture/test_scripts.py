"""Steps of a script: what they read and count is found by way of globals, as `__main__` has it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters
from torch._dynamo.variables import builder

from cotrain_compile.capture.dynamo import patches
from cotrain_compile.errors import CaptureError
from tests.support.steps import SEED, Step, all_tensors, cotrain

HEAD = """
import torch
from collections import Counter
from torch import nn
from torch.nn import functional as F

model = nn.Linear(4, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(3, 4).double(), torch.randn(3, 2).double()) for _ in range(5)]
losses = []
"""

COUNTING = """
class Phase:
    number = 0

calls, seen = 0, Counter()
weights = {"rows": 1}

def step(x, y):
    global calls
    calls += 1
    Phase.number += 2
    seen["rows"] += len(x)
    optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, calls / 3)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y) * Phase.number / calls + weights["rows"]
    loss.backward()
    optimizer.step()
    return loss

step = compile_with(step)
for x, y in batches:
    losses.append(step(x, y))
    weights["rows"] += 1
"""

APPENDING = """
def step(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())

step = compile_with(step)
for x, y in batches:
    step(x, y)
"""


def run(script: Path, compile_with: Callable[[Step], Step]) -> dict[str, Any]:
    """The globals that the script leaves."""
    torch.manual_seed(SEED)
    given = {"compile_with": compile_with}
    return runpy.run_path(str(script), init_globals=given, run_name="__main__")


def numbers(left: dict[str, Any]) -> tuple[Any, ...]:
    return left["calls"], left["Phase"].number, dict(left["seen"]), left["weights"]


def tensors(left: dict[str, Any]) -> dict[str, Tensor]:
    losses = {f"loss {i}": loss.detach() for i, loss in enumerate(left["losses"])}
    return {**all_tensors(left["model"], [left["optimizer"]]), **losses}


def check_same(script: Path) -> None:
    eager, found = run(script, lambda step: step), run(script, cotrain())
    assert numbers(found) == numbers(eager)
    torch.testing.assert_close(tensors(found), tensors(eager), rtol=0, atol=1e-12)


def test_numbers_that_a_script_counts_become_inputs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + COUNTING)
    check_same(script)
    # A counter without the key, then with it; then the numbers are inputs.
    assert counters["stats"]["unique_graphs"] <= 3


def test_a_torch_without_the_rule_for_whole_numbers_traces_every_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "_IS_CONSTANT", "not_in_this_torch")
    assert not hasattr(builder, "not_in_this_torch")
    script = tmp_path / "train.py"
    script.write_text(HEAD + COUNTING)
    check_same(script)
    assert counters["stats"]["unique_graphs"] == 5


def test_who_appends_to_a_list_is_told_why_the_step_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + APPENDING)
    told = r"train\.py:\d+ in step: `losses` changes from call to call.*`losses\.append\(.* outside"
    with pytest.warns(UserWarning, match=told):
        left = run(script, cotrain())
    eager = run(script, lambda step: step)
    torch.testing.assert_close(left["losses"], eager["losses"], rtol=0, atol=1e-12)
    # As after 64 compiles.
    monkeypatch.setattr(
        convert_frame, "exceeds_recompile_limit", lambda *_: (True, "recompile_limit")
    )
    with pytest.raises(CaptureError, match=told):
        left["step"](*left["batches"][0])
