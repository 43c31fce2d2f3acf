"""The page on what is around a step is a script that runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 8
    names: dict[str, Any] = {"__name__": "page"}
    losses = []
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
        losses.append(float(names["loss"]))
    assert losses == sorted(losses, reverse=True)
    # The step with its scheduler, the one that accumulates, and that with a gradient penalty.
    assert counters["stats"]["unique_graphs"] == 3
