"""Each write, fsync and rename of a file fails in turn: old content stays whole, caches go on."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotrain_compile import files
from cotrain_compile.entry.plan_cache import cached
from cotrain_compile.machine import Tier
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.specification import specify
from tests.support.faulty_disk import FAULTS, FaultyDisk, temporaries
from tests.unit.placement.test_solve import STEPS, problem_of

PROBLEM = problem_of(STEPS["chain"], 0.5)
PLAN = solve(PROBLEM, SolveSettings("greedy"))
WRITERS: dict[str, Callable[[Path], Any]] = {
    "machine": lambda path: files.save(find("this-machine"), path),
    "step": lambda path: files.save(PROBLEM.dataflow, path),
    "plan": lambda path: files.save(PLAN, path),
    "trace": lambda path: save_trace(specify([]), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_an_output_that_cannot_be_written_is_an_error_and_stays_as_it_was(
    name: str, tmp_path: Path
) -> None:
    disk, path = FaultyDisk(tmp_path), tmp_path / "file"
    with disk.counting():
        WRITERS[name](path)
    new, done = path.read_bytes(), tuple(disk.operations)
    assert {"open", "write", "replace"} <= set(done)
    for number in range(len(done)):
        for fault in FAULTS:
            path.write_text("as it was")
            with disk.at(number, fault), pytest.raises(OSError) as failure:  # noqa: PT011
                WRITERS[name](path)
            assert failure.value.errno in (errno.ENOSPC, errno.EIO), done[number]
            assert path.read_text() == "as it was", (done[number], fault)
            assert [each.name for each in tmp_path.iterdir()] == ["file"], (done[number], fault)
    WRITERS[name](path)
    assert path.read_bytes() == new


def test_a_plan_that_cannot_be_kept_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path / "kept"))
    disk, settings = FaultyDisk(tmp_path), SolveSettings("greedy")
    searches: list[None] = []

    def search(before: Any) -> Plan:
        searches.append(None)
        return PLAN

    with disk.counting():
        assert cached(PROBLEM, settings, search) == PLAN
    writing = len(disk.operations)
    with disk.counting():
        assert cached(PROBLEM, settings, search).tasks == PLAN.tasks
    assert len(searches) == 1
    reading = len(disk.operations)
    assert writing > 3
    assert reading == 1  # what was used last stays
    with disk.at(0, FAULTS[0]):  # it is on disk, but cannot be marked as used
        assert cached(PROBLEM, settings, search).tasks == PLAN.tasks
    for number in range(writing):
        for fault in FAULTS:
            for kept in (tmp_path / "kept").rglob("*.json"):
                kept.unlink()
            with disk.at(number, fault):
                assert cached(PROBLEM, settings, search) == PLAN
            assert not temporaries(tmp_path)
            for kept in (tmp_path / "kept").rglob("*.json"):  # whole, or not there
                assert files.load(kept, Plan).budgets[Tier.DEVICE] == PROBLEM.budgets[Tier.DEVICE]
