"""A rank that fails, dies or hangs is an error on every other rank, within the group's timeout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults_of_ranks import Fault, inject

# Of the machine's other work: a rank that hangs is given up after the timeout of the group.
SPARE_S = 20.0
# A rank that is gone is seen at its neighbours' connections; one that hangs only by the timeout.
FEW = [
    pytest.param(
        Fault("exit", "before an exchange", "ddp", ranks=3, number=1, timeout_s=30),
        marks=pytest.mark.long,
    ),
    Fault("hang", "after an exchange began", "shard", number=1, timeout_s=8),
]
LINE = r"/faults_of_ranks\.py:\d+ in step: `.*`"


@pytest.mark.parametrize("fault", FEW, ids=str)
def test_a_rank_that_fails_ends_all_with_the_line_that_waits(fault: Fault) -> None:
    ends = inject(fault)
    assert len(ends) == fault.ranks - 1
    for end in ends:
        assert end.is_ours, end
        assert end.seconds < fault.timeout_s + SPARE_S
        assert re.search(LINE, end.told), end
        assert "parameters may differ between ranks" in end.told


@pytest.mark.parametrize(
    "fault",
    [
        Fault("exit", "in a turn", "pipeline", rank=0, number=1, timeout_s=30),
        pytest.param(
            Fault("exit", "in an exchange", "burst", timeout_s=30), marks=pytest.mark.long
        ),
        pytest.param(
            Fault("hang", "in a turn", "helpers", ranks=3, timeout_s=8), marks=pytest.mark.long
        ),
        pytest.param(
            Fault("raise", "in a turn", "swapped", number=2, timeout_s=30), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_a_rank_that_fails_ends_all_that_train_by_a_plan(fault: Fault) -> None:
    for end in inject(fault):
        assert end.is_ours, end
        assert end.seconds < fault.timeout_s + SPARE_S


@pytest.mark.long  # four processes start from nothing
def test_torchrun_starts_all_ranks_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    script = root / "docs" / "examples" / "several_ranks.py"
    asked = ["--steps", "4", "--fail-at", "3", "--folder", str(tmp_path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "--max-restarts", "1", str(script), *asked],
        cwd=root,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(": 2 to 4, last loss") == 2
    assert "RuntimeError: this rank fails for once" in done.stderr
    assert "cotrain_compile.errors.ExchangeFailed: " in done.stderr
