"""The three pages that a newcomer begins with run as they stand, in a folder of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.pages import ROOT, blocks

START = ROOT / "docs" / "start"
NOTEBOOK = ROOT / "docs" / "examples" / "less_memory.ipynb"


def script(page: str) -> str:
    """The Python of a page, from top to bottom."""
    return "\n".join(blocks(START / f"{page}.md", "python"))


SOONER = ('{"memory_budget": "2MiB"}', '{"memory_budget": "2MiB", "work_limit": 1}')


@pytest.mark.parametrize(
    "change",
    [SOONER, pytest.param(("", ""), marks=pytest.mark.long)],
    ids=["quick", "as it stands"],
)
def test_training_in_less_memory(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, said = script("less-memory"), list[str]()
    assert change[0] in text
    program = compile(text.replace(*change), "less-memory", "exec")
    exec(program, {"print": said.append})
    assert len(said) == 1
    assert Path("report.html").stat().st_size > 1000


def test_the_notebook_is_the_page() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.rstrip("\n") for block in blocks(START / "less-memory.md", "python")]
    wrong = [out for cell in cells for out in cell.get("outputs", ()) if "ename" in out]
    assert wrong == []


@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="needs nbconvert and ipykernel")
    shutil.copy(NOTEBOOK, tmp_path)  # it writes where it lies
    to = ("--to", "notebook", "--execute", "--output", "run.ipynb", NOTEBOOK.name)
    run = subprocess.run(
        [sys.executable, "-m", "nbconvert", *to], cwd=tmp_path, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()


def test_the_step_of_several_cards_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    exec(compile(script("several-cards"), "several-cards", "exec"), {"print": said.append})
    assert said[0].startswith("rank 0 of 1: ")
    assert not dist.is_initialized()


def run_commands(folder: Path, text: str) -> str:
    """What a reader sees who types `text` in `folder`, with the commands of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment: dict[str, Any] = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        ["bash", "-euc", text], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.long
def test_two_ranks_train_by_the_page_of_several_cards(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script("several-cards"), encoding="utf-8")
    said = run_commands(tmp_path, "\n".join(blocks(START / "several-cards.md", "bash")))
    assert said.count(" of 2: ") == 2


@pytest.mark.long
def test_a_rental_is_planned_by_the_commands_of_its_page(tmp_path: Path) -> None:
    """With two layers in place of 32: the whole model takes minutes."""
    (tmp_path / "job.py").write_text(script("before-you-rent"), encoding="utf-8")
    commands = "\n".join(blocks(START / "before-you-rent.md", "bash"))
    assert commands.count('"num_hidden_layers": 32') == 1
    layers = '"num_hidden_layers": 2'
    said = run_commands(tmp_path, commands.replace('"num_hidden_layers": 32', layers))
    for question in ("fits?", "how fast?", "why?", "what helps?"):
        assert f"\n{question} " in said
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "sweep" / "sweep.html").exists()
