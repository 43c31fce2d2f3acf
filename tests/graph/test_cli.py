"""The command line: words for every file, one line an error, torch only where it computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotrain_compile import __version__, files, presets
from cotrain_compile.cli import app, main
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.plan import Lane, Placement, Plan, Span, Timeline, UpdateMode
from cotrain_compile.runtime import calibrate

DATAFLOW = Dataflow(
    fingerprint="f1",
    ops=(Op("mm", "aten.mm.default", Phase.FORWARD, ("w",), ("h",), flops=8_000_000_000),),
    buffers=(Buffer("w", 1024, Role.PARAM, is_input=True), Buffer("h", 2048, Role.TEMPORARY)),
)
PLAN = Plan(
    fingerprint="f1",
    machine="rtx4090",
    budgets={Tier.DEVICE: 4096, Tier.HOST: 4096},
    placement=Placement("resident", {"w": Tier.DEVICE}, {"w": UpdateMode.RESIDENT}),
    tasks=(),
    predicted=Timeline(
        "predicted", (Span(Lane.DEVICE, "mm", 0.0, 0.25),), {Tier.DEVICE: 3072, Tier.HOST: 0}
    ),
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def error_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> str:
    """What `cotrain-compile ARGS` says on stderr when it fails with exit code 1."""
    monkeypatch.setattr(sys, "argv", ["cotrain-compile", *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    return capsys.readouterr().err


def test_the_version_is_the_package_s() -> None:
    assert run("--version") == f"cotrain-compile {__version__}\n"


def test_a_plan_is_told_in_words_and_drawn(tmp_path: Path) -> None:
    files.save(PLAN, tmp_path / "plan.json")
    files.save(DATAFLOW, tmp_path / "step.json")
    picture = tmp_path / "step.png"
    said = run("show", str(tmp_path / "plan.json"), "--timeline", str(picture))
    assert "resident on rtx4090" in said
    assert "250.0 ms a step" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_step_is_told_in_words(tmp_path: Path) -> None:
    files.save(DATAFLOW, tmp_path / "step.json")
    said = run("show", str(tmp_path / "step.json"))
    assert "1 ops, 8.0 Gflop" in said
    assert "3.0 KiB if all is on the device" in said


def test_a_machine_is_told_in_words(tmp_path: Path) -> None:
    files.save(presets.find("rtx4090"), tmp_path / "machine.json")
    said = run("show", str(tmp_path / "machine.json"))
    assert "24.0 GiB" in said


def test_machines_lists_every_preset() -> None:
    said = run("machines")
    assert all(name in said for name in (*presets.PRESETS, presets.THIS_MACHINE))


def test_calibrate_saves_a_machine_that_show_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = calibrate.Calibration(presets.find("rtx4090"), {1: 1e9}, ("memory is slow here",))
    monkeypatch.setattr(calibrate, "calibrate", lambda progress, device: measured)
    path = tmp_path / "machine.json"
    assert "memory is slow here" in run("calibrate", "-o", str(path))
    assert files.load(path, Machine) == presets.find("rtx4090")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not a whole JSON document"),
        ("[1]", "kind is None"),
        ('{"kind": "recipe"}', "kind is 'recipe'; show reads plan, dataflow"),
        ('{"kind": "plan", "format_version": 0, "data": {}}', "format_version is 0"),
    ],
)
def test_a_bad_file_is_one_line_of_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
    problem: str,
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    said = error_of(monkeypatch, capsys, "show", str(path))
    assert problem in said
    assert said.count("\n") == 1


def test_a_missing_file_is_one_line_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(monkeypatch, capsys, "show", str(tmp_path / "absent.json"))
    assert said == f"error: {tmp_path / 'absent.json'}: No such file or directory\n"


def test_a_machine_has_no_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    files.save(presets.find("rtx4090"), path)
    said = error_of(monkeypatch, capsys, "show", str(path), "--timeline", str(tmp_path / "x.png"))
    assert "give --timeline with a plan.json" in said


def test_reading_files_loads_no_torch(tmp_path: Path) -> None:
    files.save(PLAN, tmp_path / "plan.json")
    code = (
        "import sys; from cotrain_compile.cli import app; "
        f"app(['show', {str(tmp_path / 'plan.json')!r}], standalone_mode=False); "
        "app(['machines'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr or "torch was loaded"


JOB = """
import torch
from torch import nn


def build():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.randn(8, 16),)


def half_a_step():
    return lambda x: x
"""


def test_a_job_is_traced_and_analyzed_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    saved = tmp_path / "step.json"
    said = run("trace", f"{tmp_path}/job.py:build", "-o", str(saved), "--dynamic")
    assert "2 parameters can be updated on the host" in said
    dataflow = files.load(saved, Dataflow)
    assert 8 in dataflow.symbols.values()
    assert {group.param for group in dataflow.updates} == {"weight", "bias"}
    said = run("analyze", str(saved), "--machine", "rtx4090", "--memory-budget", "1MiB")
    assert "budget 1.0 MiB" in said
    assert "weight (param)" in said
    assert "gradient+param+state" in said
    (symbol,) = (name for name, size in dataflow.symbols.items() if size == 8)
    assert f"{symbol} (traced at 8) can grow to" in said


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("absent.py:build", "name an existing file and a function"),
        ("job.py", "name an existing file and a function"),
        ("job.py:absent", "has no function 'absent'"),
        ("job.py:half_a_step", "must return (step, arguments)"),
    ],
)
def test_a_wrong_job_is_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: str,
    expected: str,
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    said = error_of(monkeypatch, capsys, "trace", f"{tmp_path}/{job}", "-o", "unused.json")
    assert expected in said
    assert said.count("\n") == 1
