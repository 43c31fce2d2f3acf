"""The examples of training on several ranks run as scripts, by torchrun, one for each strategy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import StagePlan

ROOT = Path(__file__).parents[3]
POINTS = ("layers.1", "layers.2", "layers.3")
PLANS = {
    "pipeline": StagePlan("GPipe", POINTS[1:2], 4, 4),
    "swapped": StagePlan("LoopedBFS", POINTS, 4, 4, swapped=True, ahead=True),
}


@pytest.mark.long  # each starts three or four processes from nothing
@pytest.mark.parametrize(
    ("name", "ranks", "arguments"),
    [
        ("replicas", 2, "--checkpoint model.pt"),
        ("replicas", 2, "--order by-layer --budget 150KiB --checkpoint model.pt"),
        ("pipeline", 2, "--plan pipeline.json --save folder"),
        ("pipeline", 2, "--plan swapped.json --save folder --budget 128KiB"),
        ("burst", 2, "--checkpoint model.pt"),
        ("scaled", 4, "--mesh shard=2,tensor=2"),
        ("scaled", 4, "--mesh pipeline=2,replicate=2 --budget 400KiB"),
        ("cpu_helpers", 3, "--helpers 1 --checkpoint model.pt"),
    ],
)
def test_an_example_trains(tmp_path: Path, name: str, ranks: int, arguments: str) -> None:
    for plan, stages in PLANS.items():
        files.save(stages, tmp_path / f"{plan}.json")
    script = ROOT / "docs" / "examples" / f"{name}.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(ranks), str(script), *arguments.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss " in done.stdout
