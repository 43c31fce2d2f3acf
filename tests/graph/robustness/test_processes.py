"""Processes: they end well with updates in flight, share Inductor's cache, and name a bad one."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cotrain_compile.errors import OptionError
from tests.support.steps import cotrain, cross_entropy, make_mlp, make_step, vectors

ROOT = Path(__file__).parents[3]

# The updates of the last step begin when the program is at its end.
ENDS_BUSY = """
import sys, time, torch
from pathlib import Path
from tests.support.held_back import make_training, run_steps, with_kernels

training = make_training(Path(sys.argv[1]))
run_steps(training, 2)

def slowly(name, kernel):
    def run(*arguments):
        time.sleep(0.1)
        kernel(*arguments)
        print(name, flush=True)
    return run

with with_kernels(training.compiled, slowly):
    run_steps(training, 1)
print(len(training.compiled.plan.host_updates), flush=True)
{end}
"""
ENDS = {
    "at its last line": ("", 0),
    "by sys.exit": ("sys.exit(3)", 3),
    "by an exception": ("raise RuntimeError('the end')", 1),
    "with the step gone": ("del training; torch._dynamo.reset()", 0),
    "by an interrupt": ("import signal; signal.raise_signal(signal.SIGINT)", -2),
}


def run_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.long if number else ())
        for number, how in enumerate(ENDS)
    ],
)
def test_a_process_ends_when_its_updates_have(how: str, tmp_path: Path) -> None:
    end, status = ENDS[how]
    ended = run_child(ENDS_BUSY.replace("{end}", end), str(tmp_path))
    assert ended.returncode == status, ended.stderr
    lines = ended.stdout.splitlines()
    (count,) = (int(line) for line in lines if line.isdigit())
    assert len([line for line in lines if line.startswith("update.")]) == count > 0
    assert "Fatal" not in ended.stderr


# A full disk.


def test_a_dump_to_a_full_disk_is_an_error_of_its_option(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = make_step(model, [optimizer], cross_entropy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OptionError, match=f"option 'dump' is '{tmp_path}': File too large"):
            cotrain(dump=str(tmp_path))(plain)(*vectors())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch._dynamo.reset()
    cotrain(dump=str(tmp_path))(plain)(*vectors())
    assert (tmp_path / "plan.json").exists()


# Inductor's cache.

COMPILES = """
import torch
from tests.support.steps import all_tensors, cotrain, cross_entropy, make_mlp, make_step, vectors

torch.manual_seed(0)
model = make_mlp().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compile_with = cotrain(policy="streamed", lowering="inductor")
step = compile_with(make_step(model, [optimizer], cross_entropy))
for _ in range(2):
    print(float(step(*vectors())))
"""


@pytest.mark.long
def test_two_processes_share_a_cache_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    cache = str(tmp_path)
    command = [sys.executable, "-c", COMPILES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": cache}
    both = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    losses = told[0][0]
    assert told[1][0] == losses
    cached = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert cached
    for path in cached:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    # torch makes some of it again; of the rest it says what file it is.
    damaged = run_child(COMPILES, TORCHINDUCTOR_CACHE_DIR=cache)
    if damaged.returncode:
        assert "LoweringError: Inductor cannot compile segment" in damaged.stderr
        assert "if its cache is damaged, delete the folder that TORCHINDUCTOR" in damaged.stderr
        shutil.rmtree(cache)
        damaged = run_child(COMPILES, TORCHINDUCTOR_CACHE_DIR=cache)
    assert damaged.returncode == 0, damaged.stderr
    assert damaged.stdout == losses
