"""What a command writes: never over what it reads, and named where it cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cotrain_compile import files
from cotrain_compile.cli.main import main
from tests.unit.data.test_full_disk import room_for
from tests.unit.viz.test_report import PLAN, STEP

WAYS: dict[str, Callable[[Path, Path], object]] = {
    "itself": lambda file, other: None,
    "symlink": lambda file, other: other.symlink_to(file),
    "hard link": lambda file, other: os.link(file, other),
}
# READ stands for a file that is read, and WRITTEN for another name of it.
OVER_WHAT_IS_READ = (
    ("step.json", "solve READ -o WRITTEN --machine rtx4090"),
    ("machine.json", "solve step.json -o WRITTEN --machine READ"),
    ("step.json", "graph READ -o WRITTEN"),
    ("plan.json", "graph step.json --plan READ -o WRITTEN"),
    ("plan.json", "show READ --html WRITTEN"),
    ("step.json", "show plan.json --perfetto WRITTEN"),
    ("measured.json", "show plan.json --measured READ --timeline WRITTEN"),
    ("profile.json", "cluster READ --cluster 8xh100 --page WRITTEN"),
    ("job.py", "trace READ:build -o WRITTEN"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.save(STEP, tmp_path / "step.json")
    files.save(PLAN, tmp_path / "plan.json")
    for name in ("machine.json", "measured.json", "profile.json", "job.py"):
        (tmp_path / name).write_text("as it was")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["cotrain-compile", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "command"), OVER_WHAT_IS_READ)
def test_what_is_read_is_not_written_over(
    name: str,
    command: str,
    way: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = folder / (name if way == "itself" else "other.json")
    WAYS[way](folder / name, other)
    before = (folder / name).read_bytes()
    typed = command.replace("READ", name).replace("WRITTEN", str(other)).split()
    assert "which would be lost" in error_of(monkeypatch, capsys, *typed)
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("name", ["absent.json", "nowhere/absent.json"])
@pytest.mark.parametrize("command", ["solve READ -o READ --machine rtx4090", "graph READ -o READ"])
def test_what_should_be_read_and_is_absent_is_not_blamed_on_the_output(
    command: str,
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = error_of(monkeypatch, capsys, *command.replace("READ", name).split())
    assert f"{name} is not there, and this command reads it" in said
    assert "--output" not in said
    assert not (folder / name).exists()


def test_a_sweep_is_not_written_over_its_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "step.json").rename(folder / "sweep.json")
    said = error_of(monkeypatch, capsys, "sweep", "sweep.json", "-o", str(folder))
    assert "which would be lost" in said


def test_two_outputs_are_two_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ("show", "plan.json", "--html", "new", "--perfetto", str(folder / "new"))
    assert "is the file of --html, too" in error_of(monkeypatch, capsys, *typed)


def test_a_preset_is_no_file_that_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["cotrain-compile", "solve", "step.json", "-o", "rtx4090", "--machine", "rtx4090"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "solve step.json --machine rtx4090 -o new",
        "graph step.json -o new.txt",
        "show plan.json --perfetto new",
        "show plan.json --timeline new.png",
    ],
)
def test_a_full_disk_names_file_and_flag(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(os.listdir(folder))
    *_, flag, file = command.split()
    with room_for(10):
        said = error_of(monkeypatch, capsys, *command.split())
    named = {"-o": "--output"}.get(flag, flag)
    assert said.startswith(f"error: {named} {file} cannot be written: File too large")
    assert len(said.splitlines()) == 1
    assert sorted(os.listdir(folder)) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("asked", ["--version", "machines"])
def test_standard_output_that_is_full_is_told_in_one_line(asked: str) -> None:
    command = [sys.executable, "-m", "cotrain_compile", asked]
    root = Path(__file__).parents[3]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert "standard output" in run.stderr
    assert "No space left on device" in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("module", ["typer", "pydantic", "dataclasses"])
def test_ctrl_c_while_it_starts_is_one_line(module: str, tmp_path: Path) -> None:
    """As if the key were pressed while `module` is loaded."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        f"sys.modules.pop({module!r}, None)\n"
        "sys.meta_path.insert(0, Pressed())\n"
    )
    root = Path(__file__).parents[3]
    path = os.pathsep.join((str(tmp_path), str(root)))
    run = subprocess.run(
        [sys.executable, "-m", "cotrain_compile", "machines"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (130, "stopped by Ctrl-C\n")
