"""A computer that nobody has measured is measured when a step is first planned for it, and kept."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.cli.reading import read_problem
from cotrain_compile.machine import Machine, Rates
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.presets import THIS_MACHINE, find
from cotrain_compile.runtime.calibrate import first_use
from cotrain_compile.runtime.calibrate.calibrate import Calibration
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.support.phases import told_to
from tests.support.captured_steps import make_two_layers
from tests.support.steps import OPTIMIZERS, cotrain, cross_entropy, make_step, vectors

# The package's attribute of that name is the function.
calibrate_module = importlib.import_module("cotrain_compile.runtime.calibrate.calibrate")
CPU = torch.device("cpu")
SMALL = Sizes(2**16, 64, 16, 2**10, 2**10, 1)
FOUND = find(THIS_MACHINE).but(name="as calibrated", rates=Rates.MEASURED, issue_s=1e-6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(first_use, "QUICK", SMALL)
    monkeypatch.setattr(calibrate_module, "share_of_cores", lambda: 1.0)
    first_use._kept_or_measured.cache_clear()
    yield tmp_path / "kept" / "machines"
    first_use._kept_or_measured.cache_clear()


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What each calibration met: the device, and what new tensors are where it ran."""
    met: list[tuple[object, ...]] = []

    def calibrate(device: str, sizes: Sizes) -> Calibration:
        met.append((device, torch.ones(1).dtype, torch.ones(1).device))
        return Calibration(FOUND, {1: 1e9}, ())

    monkeypatch.setattr(first_use, "calibrate", calibrate)
    return met


def test_a_first_step_is_planned_for_its_computer_as_measured(folder: Path, tmp_path: Path) -> None:
    model = make_two_layers()
    step = make_step(model, OPTIMIZERS["adamw"](model), cross_entropy)
    compiled = cotrain(policy="zero-offload", quiet=True, dump=str(tmp_path / "dump"))(step)
    compiled(*vectors())
    found = cotrain_compile.inspect(compiled)
    assert " predicted;" in repr(found)
    (kept,) = folder.iterdir()
    assert found.problem.machine == files.load(kept, Machine)
    assert found.problem.machine.rates is Rates.MEASURED
    # What it left for others to look at is read with the rates that it was made with.
    file = tmp_path / "dump" / "plan.json"
    problem = read_problem(load_plan(file), file, None, None, None)
    assert problem.machine == found.problem.machine


@pytest.mark.parametrize("listens", [True, False])
def test_a_measurement_is_said_before_it_begins_and_has_its_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listens: bool
) -> None:
    said: list[tuple[bool, float]] = []

    def calibrate(device: str, sizes: Sizes) -> Calibration:
        said.append(("measuring this computer" in caplog.text, sizes.until_s - time.monotonic()))
        return Calibration(FOUND, {1: 1e9}, ())

    monkeypatch.setattr(first_use, "calibrate", calibrate)
    monkeypatch.setattr(first_use.LOG, "propagate", True)
    caplog.set_level("INFO")
    with told_to(lambda phase: None) if listens else nullcontext():
        first_use.measured_machine(CPU)
    ((is_told, left_s),) = said
    assert is_told is listens
    assert 0 < left_s <= first_use.SAMPLING_S


def test_the_next_process_measures_nothing(
    folder: Path, measuring: list[tuple[object, ...]]
) -> None:
    first = first_use.measured_machine(CPU)
    first_use._kept_or_measured.cache_clear()
    assert first == first_use.measured_machine(CPU) == replace(FOUND, name=THIS_MACHINE)
    assert len(measuring) == 1


@pytest.mark.parametrize("content", ["{", "guessed"])
def test_a_file_that_is_no_measured_machine_is_measured_again(
    folder: Path, measuring: list[tuple[object, ...]], content: str
) -> None:
    first_use.measured_machine(CPU)
    (kept,) = folder.iterdir()
    kept.write_text(files.to_json(find(THIS_MACHINE)) if content == "guessed" else content)
    first_use._kept_or_measured.cache_clear()
    first_use.measured_machine(CPU)
    assert len(measuring) == 2
    assert files.load(kept, Machine).rates is Rates.MEASURED


def test_what_the_program_has_set_for_new_tensors_changes_no_rate(
    folder: Path, measuring: list[tuple[object, ...]]
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            first_use.measured_machine(CPU)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert measuring == [("cpu", torch.float32, CPU)]


def test_where_nothing_is_kept_or_ranks_work_beside_it_rates_are_guessed(
    folder: Path, measuring: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "count_of_ranks", lambda: 2)
        assert first_use.measured_machine(CPU) is None
    monkeypatch.setenv("COTRAIN_CACHE_DIR", "")
    assert first_use.measured_machine(CPU) is None
    assert not measuring


@pytest.mark.parametrize("is_quiet_later", [True, False])
def test_what_a_busy_computer_gave_is_kept_while_it_is_busy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_quiet_later: bool
) -> None:
    shares = iter([0.2, 1.0])
    met: list[float] = []

    def calibrate(device: str, sizes: Sizes) -> Calibration:
        met.append(next(shares))
        return Calibration(FOUND.but(issue_s=1e-3 * met[-1]), {1: 1e9}, (), met[-1])

    monkeypatch.setattr(first_use, "calibrate", calibrate)
    monkeypatch.setattr(first_use, "share_of_cores", lambda: 1.0 if is_quiet_later else 0.2)
    found = []
    for _ in range(3):
        found.append(first_use.measured_machine(CPU))
        first_use._kept_or_measured.cache_clear()
    assert len(met) == 1 + is_quiet_later
    assert found[1] == found[2]
    assert (found[0] == found[1]) is not is_quiet_later


def test_rates_of_a_busy_computer_are_told_as_such(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        first_use, "calibrate", lambda device, sizes: Calibration(FOUND, {1: 1e9}, (), 0.3)
    )
    monkeypatch.setattr(first_use.LOG, "propagate", True)
    caplog.set_level("INFO")
    with told_to(lambda phase: None):
        first_use.measured_machine(CPU)
    assert "got 30% of its cores" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("factors: depthwise cannot take 1589.235 times its roofline"),
        ZeroDivisionError("float division by zero"),
        RuntimeError("cannot pin memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_step_fails_for_being_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def calibrate(device: str, sizes: Sizes) -> Calibration:
        raise error

    monkeypatch.setattr(first_use, "calibrate", calibrate)
    with pytest.warns(UserWarning, match=f"could not be measured .{error}., so its rates"):
        assert first_use.measured_machine(CPU) is None
    assert not folder.exists()


def test_a_card_without_room_is_guessed_and_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(device: str, sizes: Sizes) -> Calibration:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(first_use, "calibrate", calibrate)
    with pytest.warns(UserWarning, match="no room to be measured, so its rates are guessed"):
        assert first_use.measured_machine(CPU) is None
    assert not folder.exists()


@pytest.mark.gpu
def test_a_card_is_measured_and_the_current_one_stays(folder: Path) -> None:
    current = torch.cuda.current_device()
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    found = first_use.measured_machine(last)
    assert found is not None
    assert found.rates is Rates.MEASURED
    assert found.runs_ahead
    assert torch.cuda.current_device() == current
