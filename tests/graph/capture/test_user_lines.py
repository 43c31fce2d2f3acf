"""What is the user's own code, and what an installed package's, wherever packages lie."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from cotrain_compile.graph.user_lines import calling_line, in_library, in_package


def test_torch_is_a_library_where_it_is_not_where_packages_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a virtual environment over a container's torch, and with Debian's dist-packages."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(site, "getsitepackages", list)
    monkeypatch.setattr(sys, "path", [*sys.path])  # another one, so that it is looked through anew
    sys.path.append("/nowhere")
    file = f"{torch.nn.utils.clip_grad.__file__}"
    assert in_library(file)
    assert in_package(file) == "torch/nn/utils/clip_grad.py"
    assert calling_line(f'  File "{file}", line 3, in clip\n    x\n') == ""


def test_a_folder_that_pip_installed_into_has_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, project = tmp_path / "packages", tmp_path / "project"
    (packages / "net-1.0.dist-info").mkdir(parents=True)
    (project / "net.egg-info").mkdir(parents=True)  # a project that is worked on
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.syspath_prepend(str(project))
    assert in_library(f"{packages / 'net' / 'model.py'}")
    assert in_package(f"{packages / 'net' / 'model.py'}") == "net/model.py"
    assert not in_library(f"{project / 'net' / 'model.py'}")
    monkeypatch.chdir(packages)
    monkeypatch.syspath_prepend("/nowhere")
    assert not in_library(f"{packages / 'train.py'}")  # scripts lie beside packages
