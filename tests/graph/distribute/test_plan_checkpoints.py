"""Checkpoints of widths and of CPU helpers load into one process, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.saved_by_plans import Training, burst_goes_on, helped_goes_on


@pytest.mark.parametrize(
    ("name", "goes_on", "workers"),
    [("burst", burst_goes_on, 0), ("cpu_helpers", helped_goes_on, 2)],
)
def test_ranks_and_one_process_go_on_from_each_other(
    three_ranks: Ranks,
    tmp_path: Path,
    name: str,
    goes_on: Callable[..., Any],
    workers: int,
) -> None:
    """Two steps on ranks, one in one process, two on ranks: as five in one process."""
    first, second, third = (tmp_path / number for number in ("first", "second", "third"))
    three_ranks.run(goes_on, range(2), None, first)
    between = Training(name)
    between.load(first)
    between.alone(range(2, 3), workers)
    between.save(second)
    three_ranks.run(goes_on, range(3, 5), second, third)
    found, alone = Training(name), Training(name)
    found.load(third)
    alone.alone(range(5), workers)
    torch.testing.assert_close(found.model.state_dict(), alone.model.state_dict())
    of_found, of_alone = found.optimizer.state_dict(), alone.optimizer.state_dict()
    torch.testing.assert_close(of_found["state"], of_alone["state"])
