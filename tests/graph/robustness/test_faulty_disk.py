"""A disk that fails while a step is compiled: caches are done without, a dump is an error."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cotrain_compile import inspect
from cotrain_compile.backends.lifecycle.kept_dry_runs import KeptDryRun
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.calibrate import first_use
from cotrain_compile.runtime.calibrate.calibrate import Calibration
from cotrain_compile.viz.dump import dump_step
from tests.graph.runtime.test_first_use import FOUND
from tests.support.captured_steps import captured, make_two_layers
from tests.support.faults import compiled_setting
from tests.support.faulty_disk import FAULTS, FULL, FaultyDisk, temporaries
from tests.support.steps import OPTIMIZERS, cotrain, cross_entropy, make_step, vectors

SEED = 0


def trained(**options: Any) -> list[Tensor]:
    """What two steps of a small model return and leave."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    model = make_two_layers()
    step = make_step(model, OPTIMIZERS["adamw"](model), cross_entropy)
    compiled = cotrain(policy="zero-offload", quiet=True, **options)(step)
    losses = [compiled(*vectors()).detach() for _ in range(2)]
    assert inspect(compiled).steps == 2
    return [*losses, *(value.detach() for value in model.state_dict().values())]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    (tmp_path / "torch").mkdir()  # torch itself does not go on without
    calibration = Calibration(FOUND, {1: 1e9}, ())
    monkeypatch.setattr(first_use, "calibrate", lambda **_: calibration)
    first_use._kept_or_measured.cache_clear()
    return tmp_path


def test_training_goes_on_where_nothing_can_be_kept(folder: Path) -> None:
    disk = FaultyDisk(folder)
    with disk.counting():
        expected = trained(plan_cache=True)
    count = len(disk.operations)
    assert {"open", "write", "replace", "mkdir"} <= set(disk.operations)
    for first in (0, count // 2):  # nothing else is left of the disk
        first_use._kept_or_measured.cache_clear()
        for each in ("kept", "torch"):
            shutil.rmtree(folder / each, ignore_errors=True)
        (folder / "torch").mkdir()
        with disk.from_on(first):
            found = trained(plan_cache=True)
        assert len(disk.operations) > first
        assert all(map(torch.equal, found, expected))
        assert not temporaries(folder / "kept")


def test_a_dry_run_or_a_machine_that_cannot_be_kept_is_made_again(folder: Path) -> None:
    disk, kept = FaultyDisk(folder), KeptDryRun(folder / "kept" / "dry runs" / "one")
    peaks = {Tier.DEVICE: 3, Tier.HOST: 5}
    with disk.counting():
        kept.keep(peaks)
        first_use.measured_machine(torch.device("cpu"))
    for number in range(len(disk.operations)):
        for fault in FAULTS:
            first_use._kept_or_measured.cache_clear()
            for path in (folder / "kept").rglob("*"):
                if path.is_file():
                    path.unlink()
            with disk.at(number, fault):
                kept.keep(peaks)
                assert first_use.measured_machine(torch.device("cpu")) is not None
            assert kept.peak_bytes() in (None, peaks)
            assert not temporaries(folder)


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_dump_that_cannot_be_written_leaves_whole_files(tmp_path: Path, every: int) -> None:
    step, compiled = captured("clipped").step, compiled_setting("host")
    disk, out = FaultyDisk(tmp_path), tmp_path / "out"

    def dump() -> None:
        dump_step(out, step, compiled.problem, compiled.plan, compiled.graph, None)

    dump()
    with disk.counting():  # over the files that are there
        dump()
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    done = tuple(disk.operations)
    for number, operation in list(enumerate(done))[::every]:
        with disk.at(number, FAULTS[number % len(FAULTS)]), pytest.raises(OSError) as failure:  # noqa: PT011
            dump()
        assert failure.value.errno in (errno.ENOSPC, errno.EIO), operation
        assert {path.name: path.stat().st_size for path in out.iterdir()} == sizes


def test_a_dump_that_cannot_be_written_names_its_option(folder: Path) -> None:
    disk, out = FaultyDisk(folder / "out"), folder / "out"
    with disk.at(2, FULL), pytest.raises(OptionError, match=r"dump.*No space left on device"):
        trained(dump=str(out))
    assert not temporaries(out)
