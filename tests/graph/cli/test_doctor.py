"""Doctor: what is found on this computer, what is used of it, and what is to be changed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from cotrain_compile.cli.main import app
from cotrain_compile.runtime import examine as module
from cotrain_compile.runtime.examine import Finding, examine
from cotrain_compile.support import limits
from cotrain_compile.support.units import format_bytes


def findings() -> dict[str, Finding]:
    return {one.topic: one for one in examine()}


def test_this_computer_can_train() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    assert f"{torch.get_num_threads()} threads of torch" in result.output
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)["findings"]
    assert [one["topic"] for one in told] == list(findings())
    assert all(one["found"] for one in told)
    assert {"card", "host memory", "pinned memory"} <= findings().keys()
    assert not findings()["pinned memory"].change  # there is no card to pin for


def test_what_is_missing_is_named_with_the_way_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(module, "LOW_DISK_BYTES", 1 << 60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    found = findings()
    assert found["C++ compiler"].change.startswith("install g++")
    assert found["cache"].found.startswith(str(tmp_path / "not" / "yet"))
    assert "COTRAIN_CACHE_DIR" in found["cache"].change
    assert "OMP_NUM_THREADS=" in found["cores"].change
    monkeypatch.setenv("COTRAIN_CACHE_DIR", "")
    assert "plans and measures anew" in findings()["cache"].used


@pytest.mark.parametrize(("version", "is_wanted"), [("2.10.1", False), ("2.11.0", True)])
def test_another_torch_prevents_a_step(version: str, is_wanted: bool) -> None:
    with mock.patch.object(torch, "__version__", version):
        assert findings()["versions"].prevents is not is_wanted
        assert CliRunner().invoke(app, ["doctor"]).exit_code == (0 if is_wanted else 1)


def test_a_card_is_told_with_its_default_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    total, free = 24 << 30, 6 << 30
    card = SimpleNamespace(name="NVIDIA GeForce RTX 4090", major=8, minor=9, total_memory=total)
    for name, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 1),
        ("get_device_properties", lambda device: card),
        ("mem_get_info", lambda device: (free, total)),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    monkeypatch.setattr(module, "DRIVER", driver)
    monkeypatch.setattr(limits, "locked_memory_limit_bytes", lambda: 8 << 20)
    every = findings()
    found, pinned = every["card 0"], every["pinned memory"]
    assert "8.0 MiB" in pinned.found
    assert "memlock" in pinned.change
    assert "compute capability 8.9" in found.found
    assert "driver 570.86.15" in found.found
    assert found.used.startswith(format_bytes(free - total // 20))
    assert "rates of the preset rtx4090" in found.used
    assert "another process" in found.change
