"""Calibration: a quick run gives a usable machine, and each pressure point is put in words."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from cotrain_compile import presets
from cotrain_compile.errors import OptionError
from cotrain_compile.files import load, save
from cotrain_compile.machine import Machine
from cotrain_compile.runtime.calibrate import link_bench
from cotrain_compile.runtime.calibrate.busy import busy_remark, is_busy, share_of_cores
from cotrain_compile.runtime.calibrate.calibrate import Calibration, calibrate, issue_s
from cotrain_compile.runtime.calibrate.environment import (
    Environment,
    environment_remarks,
    read_environment,
)
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.process.cores import Cores, bind_this_thread, usable_cores
from tests.support import thread_card
from tests.support.calibrations import without_constants
from tests.support.thread_card import ThreadCard

calibrate_module = importlib.import_module("cotrain_compile.runtime.calibrate.calibrate")
GIB = 2**30
SMALL = Sizes(
    copy_bytes=2**16, small_copy_bytes=64, matmul_side=32, updated_parameters=2**12, repeats=2
)
QUIET = Environment(
    omp_num_threads=None,
    machine_cores=16,
    usable_cores=16,
    installed_memory_bytes=64 * GIB,
    memory_limit_bytes=None,
    locked_memory_limit_bytes=None,
    numa_nodes=1,
    cuda=True,
)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """All of it, the constants of ops too."""
    return calibrate(sizes=SMALL)


@pytest.fixture(autouse=True)
def constants(calibration: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other calibration has none."""
    without_constants(monkeypatch)


def test_when_its_time_is_over_each_figure_has_one_sample_behind_a_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = Counter[str]()

    def counting(what: str, work: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            counts[what] += 1
            return work(*arguments, **options)

        return run

    update = calibrate_module.adamw_update
    monkeypatch.setattr(
        calibrate_module, "adamw_update", lambda size: counting("updates", update(size))
    )
    copies = link_bench._in_threads
    monkeypatch.setattr(link_bench, "_in_threads", counting("copies", copies))
    monkeypatch.setattr(
        calibrate_module, "wall_s", counting("issues and updates", calibrate_module.wall_s)
    )
    found = calibrate(sizes=replace(SMALL, repeats=9, until_s=0.0))
    figures = len(found.host_update_bytes_per_s) + 2  # alone, and while copying
    assert counts["updates"] == 2 * figures
    assert counts["copies"] == 2 * 4  # tiny, down, up and both
    # A copy takes microseconds to issue, and the median of two would be what the first one took.
    fewest = calibrate_module._FIRST_ISSUES + calibrate_module._FEWEST_ISSUES
    assert counts["issues and updates"] == 2 * figures + fewest + 1
    test_every_figure_of_the_measured_machine_is_positive(found)


@pytest.mark.parametrize(("until", "samples"), [(0.0, 2), (2.5, 3), (100.0, 6)])
def test_the_least_is_of_what_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, until: float, samples: int
) -> None:
    taken_s = [0.5, 9.0, 8.0, 7.0, 6.0, 5.0]
    now = [0.0]

    def sample() -> float:
        now[0] += 1.0
        return taken_s[int(now[0]) - 1]

    monkeypatch.setattr(link_bench, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found_s = link_bench.least_s(sample, 5, until)
    assert now[0] == samples
    assert found_s == {2: 9.0, 3: 8.0, 6: 5.0}[samples]  # the first is never counted


def test_a_task_costs_what_it_does_in_the_quietest_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others had the interpreter, or the cores, for three quarters of the time and once more."""
    others = iter([1e-2] * 3 + [7e-3] * 48 + [4e-5] * 23 + [7e-3] * 100)
    monkeypatch.setattr(calibrate_module, "wall_s", lambda work: (work(), next(others))[1])
    card = ThreadCard()
    with mock.patch.object(thread_card, "LONGEST_DELAY_S", 0.0):
        seconds = issue_s(CudaDevice(card, PinnedPool(card.pin, card.unpin), 1 << 40, {}))
    assert seconds == 4e-5


@pytest.mark.parametrize(
    ("measured", "kept", "words"),
    [
        pytest.param(5e-5, 5e-5, [], marks=pytest.mark.long),
        (7e-3, presets.ISSUE_S, ["0.007", "quiet", f"{presets.ISSUE_S:g}"]),
    ],
)
def test_milliseconds_of_python_a_task_are_not_believed(
    monkeypatch: pytest.MonkeyPatch, measured: float, kept: float, words: list[str]
) -> None:
    monkeypatch.setattr(calibrate_module, "issue_s", lambda device, until_s: measured)
    found = calibrate(sizes=replace(SMALL, until_s=0.0))
    assert found.machine.issue_s == kept
    told = [remark for remark in found.remarks if "for a task" in remark and "measured" in remark]
    told = [remark for remark in told if "calibrate again" not in remark]
    assert len(told) == bool(words)
    assert all(word in told[0] for word in words)


def test_what_was_measured_on_a_busy_computer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.9, 0.25])  # others came meanwhile
    monkeypatch.setattr(calibrate_module, "share_of_cores", lambda: next(shares))
    found = calibrate(sizes=replace(SMALL, until_s=0.0))
    assert found.share == 0.25
    assert any("got 25% of its cores" in remark for remark in found.remarks)


def test_a_process_by_itself_gets_its_cores_and_waiting_is_not_having_them() -> None:
    assert 0 < share_of_cores() <= 1
    with mock.patch("time.process_time", return_value=0.0):
        assert share_of_cores() == 0.0
    assert is_busy(0.0)
    assert not is_busy(1.0)
    assert busy_remark(1.0) == ""


def test_every_figure_of_the_measured_machine_is_positive(calibration: Calibration) -> None:
    machine = calibration.machine
    for tier in (machine.device, machine.host):
        assert set(tier.flops_per_s) == {"float32", "bfloat16", "float64"}
        assert min(tier.capacity_bytes, tier.bytes_per_s, tier.launch_s) > 0
        assert min(tier.flops_per_s.values()) > 0
    for link in (machine.h2d, machine.d2h):
        assert min(link.bytes_per_s, link.latency_s) > 0
    assert machine.host_update.slowdown_while_copying >= 1
    own = calibration.host_update_bytes_per_s[torch.get_num_threads()]
    assert own == machine.host_update.bytes_per_s
    assert torch.__version__ in machine.source


def test_a_calibrated_machine_survives_its_file(calibration: Calibration, tmp_path: Path) -> None:
    save(calibration.machine, tmp_path / "machine.json")
    assert load(tmp_path / "machine.json", Machine) == calibration.machine


def test_host_updates_are_measured_from_one_thread_to_all_cores(calibration: Calibration) -> None:
    threads = list(calibration.host_update_bytes_per_s)
    assert threads[0] == 1
    assert {read_environment().usable_cores, torch.get_num_threads()} <= {*threads}
    assert all(a < b for a, b in pairwise(threads))


def test_updates_have_the_rate_of_the_threads_that_run_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under torchrun, which sets OMP_NUM_THREADS=1; a faster number is told."""
    rates = {1: 22e9, 4: 80e9, 16: 122e9}
    monkeypatch.setattr(calibrate_module, "_host_update_rates", lambda *_: rates)
    for own, way_on in ((1, "OMP_NUM_THREADS=16"), (16, "")):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=own: own)
        found = calibrate(sizes=replace(SMALL, until_s=0.0))
        assert found.machine.host_update.bytes_per_s == rates[own]
        (remark,) = (r for r in found.remarks if "by thread count" in r)
        assert remark.endswith(way_on + " before the start" if way_on else "GB/s on 16")


def test_a_thread_that_is_bound_to_cores_measures_for_as_many_threads_as_it_has() -> None:
    """A rank's: threads that begin later, as the one that updates, have another number."""
    own = torch.get_num_threads() + 1

    def bound() -> Calibration:
        bind_this_thread(Cores(usable_cores(), own))
        return calibrate(sizes=replace(SMALL, until_s=0.0))

    with ThreadPoolExecutor(1) as rank:
        found = rank.submit(bound).result()
    assert found.machine.host_update.bytes_per_s == found.host_update_bytes_per_s[own]


def test_calibration_reports_progress_and_leaves_the_thread_count_alone() -> None:
    heard: list[tuple[str, float]] = []
    before = torch.get_num_threads()
    sizes = replace(SMALL, until_s=0.0)
    calibrate(lambda what, fraction: heard.append((what, fraction)), sizes=sizes)
    fractions = [fraction for _, fraction in heard]
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert fractions == sorted(fractions)
    assert all(what for what, _ in heard)
    assert torch.get_num_threads() == before


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="what is not there can be asked for only here"
)
def test_what_could_not_be_measured_is_said(calibration: Calibration) -> None:
    assert any("no CUDA device" in remark and "pinned" in remark for remark in calibration.remarks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot calibrate device 'cuda'"):
        calibrate(device="cuda", sizes=SMALL)


@pytest.mark.gpu
def test_a_cuda_device_is_measured_with_pinned_and_pageable_copies() -> None:
    calibration = calibrate(device="cuda", sizes=replace(SMALL, copy_bytes=2**22))
    assert calibration.machine.device.capacity_bytes > GIB
    assert any("pageable" in remark for remark in calibration.remarks)


def test_a_healthy_environment_is_not_remarked_on() -> None:
    assert environment_remarks(QUIET) == ()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (replace(QUIET, cuda=False), ["no CUDA device", "could not be measured"]),
        (replace(QUIET, omp_num_threads="1"), ["OMP_NUM_THREADS=1", "16 cores", "unset it"]),
        (replace(QUIET, usable_cores=4), ["4 of 16 cores", "affinity"]),
        (replace(QUIET, memory_limit_bytes=8 * GIB), ["8.00 GiB of 64.00 GiB", "host budget"]),
        (replace(QUIET, locked_memory_limit_bytes=8 * 2**20), ["0.01 GiB", "ulimit -l"]),
        (replace(QUIET, numa_nodes=2), ["2 NUMA nodes", "numactl"]),
    ],
)
def test_each_pressure_point_is_named_with_a_way_on(
    environment: Environment, words: list[str]
) -> None:
    (remark,) = environment_remarks(environment)
    assert all(word in remark for word in words)


def test_limits_that_do_not_bind_are_not_remarked_on() -> None:
    wide = replace(
        QUIET,
        memory_limit_bytes=128 * GIB,
        locked_memory_limit_bytes=64 * GIB,
        omp_num_threads="16",
    )
    assert environment_remarks(wide) == ()


def test_one_thread_on_one_core_is_as_it_should_be() -> None:
    single = replace(QUIET, omp_num_threads="1", usable_cores=1, machine_cores=1)
    assert environment_remarks(single) == ()


def test_what_it_takes_to_issue_a_copy_is_measured_on_a_card_too() -> None:
    card = ThreadCard()
    with mock.patch.object(thread_card, "LONGEST_DELAY_S", 0.0):
        seconds = issue_s(CudaDevice(card, PinnedPool(card.pin, card.unpin), 1 << 40, {}))
    assert 0 < seconds < 1
    assert not card.faults
