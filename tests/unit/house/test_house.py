"""The house itself: the wheel is complete, the links are links, metadata names real things."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import compare_golden, update_golden

ROOT = Path(__file__).parents[3]
LINKED = ("backends", "passes")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files in a wheel built from a copy of the sources, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("cotrain_compile", *LINKED):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    run = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources() -> set[str]:
    """Every Python file of the package, by its name in the wheel."""
    package = ROOT / "cotrain_compile"
    folders = [package, *(package / name for name in LINKED)]
    return {
        path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")
    }


def test_the_wheel_holds_every_module_once_under_its_package_name(wheel_names: set[str]) -> None:
    modules = {name for name in wheel_names if name.endswith(".py")}
    assert modules == sources()
    assert {f"cotrain_compile/{name}/__init__.py" for name in LINKED} <= modules


def test_the_wheel_tells_type_checkers_that_it_is_typed(wheel_names: set[str]) -> None:
    assert "cotrain_compile/py.typed" in wheel_names


def test_the_wheel_carries_its_licence(wheel_names: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


@pytest.mark.parametrize("name", LINKED)
def test_the_linked_folders_are_relative_links(name: str) -> None:
    link = ROOT / "cotrain_compile" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_every_folder_with_modules_is_a_package() -> None:
    """Package discovery skips a folder without `__init__.py`, and the wheel then lacks it."""
    folders = {(ROOT / path).parent for path in sources()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_a_class_has_a_name_of_its_own() -> None:
    """What two rooms call alike is two things to a reader; private names stay within their file."""
    named: dict[str, list[str]] = {}
    for path in sorted(sources()):
        module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(path)
    assert len(named) > 300
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {}


def test_entry_points_name_modules_of_the_package(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    backends = project["entry-points"]["torch_dynamo_backends"]
    targets = [*project["scripts"].values(), *backends.values()]
    for target in targets:
        module = target.partition(":")[0].replace(".", "/")
        assert (ROOT / f"{module}.py").is_file(), target


def test_the_changelog_knows_the_version(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_modules_for_machines_without_torch_do_not_load_it(pyproject: dict[str, Any]) -> None:
    """The import contract reads each module; this also runs the package's own `__init__`."""
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if c.get("forbidden_modules") == ["torch"])
    modules = ", ".join(contract["source_modules"])
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr or "torch was loaded"


def test_a_missing_golden_file_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="--update-golden"):
        compare_golden(tmp_path / "absent.txt", "text")


def test_a_changed_golden_file_shows_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "step.txt"
    path.write_text("mm\nadd\n", encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)-add\n\+mul.*--update-golden"):
        compare_golden(path, "mm\nmul\n")


def test_update_golden_writes_only_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "step.txt"
    assert update_golden(path, "mm\n")
    assert not update_golden(path, "mm\n")
    compare_golden(path, "mm\n")
