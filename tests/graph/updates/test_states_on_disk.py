"""States on disk: trained as without it, seen by torch as ever, and no fault of a drive is silent."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.entry.compiled import inspect
from cotrain_compile.errors import DiskError, OptionError, StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.on_disk import ROOMS
from cotrain_compile.runtime.disk.state_files import StateFile, file_of

# Of the last weight each state has three pieces, which begin inside of rows.
WIDTHS = (64, 3000, 3072)
IN_MEMORY: dict[str, Any] = {
    "machine": "rtx4090",
    "policy": "zero-offload",
    "memory_budget": "1GiB",
    "plan_cache": False,
    "quiet": True,
}


class Training:
    """A few layers, AdamW on them, and a step that clips."""

    def __init__(self, widths: Sequence[int] = WIDTHS, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch._dynamo.reset()
        self.step = torch.compile(self._step, backend="cotrain", options={**IN_MEMORY, **options})

    def _step(self, x: Tensor) -> Tensor:
        loss = self.model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, steps: range) -> None:
        for step in steps:
            batch = torch.Generator().manual_seed(step)
            self.step(torch.randn(4, self.model[0].in_features, generator=batch))  # type: ignore[arg-type]

    @property
    def states(self) -> list[Tensor]:
        return [t for state in self.optimizer.state.values() for t in state.values()]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.states]

    @property
    def on_disk(self) -> list[StateFile]:
        return [file for state in self.states if (file := file_of(state)) is not None]


def on_disk(folder: Path, widths: Sequence[int] = WIDTHS, **options: Any) -> Training:
    """A training that has no room on the host for half of its states."""
    sizes = [a * b * 4 for a, b in zip(widths, widths[1:], strict=False)]
    rooms = ROOMS * 2 * min(max(sizes), 1 << 24)
    # Parameters and gradients come down, and what an update makes is there, too.
    host = 2 * sum(sizes) + sizes[-1] + rooms + (1 << 20)
    return Training(widths, disk=folder, host_memory_budget=host, **options)


def assert_equal(one: Training, other: Training) -> None:
    for a, b in zip(one.tensors, other.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


SMALL = (64, *[512] * 24)


def test_a_step_whose_states_rest_on_disk_is_the_same_step(tmp_path: Path) -> None:
    with_disk, without = on_disk(tmp_path), Training()
    for training in (with_disk, without):
        training.train(range(3))
    assert len(with_disk.on_disk) == 2  # those of the large weight
    assert not without.on_disk
    assert_equal(with_disk, without)
    assert not list(tmp_path.iterdir())


def test_the_host_holds_rooms_in_place_of_states(tmp_path: Path) -> None:
    training = on_disk(tmp_path, SMALL)
    training.train(range(2))
    compiled = inspect(training.step)
    peaks, plan = compiled.measured.peak_bytes, compiled.plan
    assert peaks[Tier.HOST] <= plan.predicted.peak_bytes[Tier.HOST] <= plan.budgets[Tier.HOST]
    assert peaks[Tier.DISK] == sum(file.nbytes for file in training.on_disk) > 0
    assert plan.predicted.peak_bytes[Tier.DISK] == peaks[Tier.DISK]


def test_checkpoints_go_from_disk_to_memory_and_back(tmp_path: Path) -> None:
    """Saved in the middle of a training and loaded into others, each goes on alike."""
    path = tmp_path / "checkpoint.pt"
    first = on_disk(tmp_path, SMALL)
    first.train(range(2))
    torch.save((first.model.state_dict(), first.optimizer.state_dict()), path)
    first.train(range(2, 4))
    others = on_disk(tmp_path, SMALL), Training(SMALL)
    for other in others:
        other.train(range(1))  # its states are at home, and are loaded into there
        files = other.on_disk
        of_model, of_optimizer = torch.load(path)
        other.model.load_state_dict(of_model)
        other.optimizer.load_state_dict(of_optimizer)
        assert other.on_disk == files
        other.train(range(2, 4))
        assert_equal(first, other)


def test_what_eager_code_writes_is_what_the_next_step_reads(tmp_path: Path) -> None:
    with_disk, without = on_disk(tmp_path, SMALL), Training(SMALL)
    for training in (with_disk, without):
        training.train(range(1))
        for state in training.states:
            state.mul_(0.5)
        training.train(range(1, 2))
    assert with_disk.on_disk
    assert_equal(with_disk, without)


# Faults.


def test_a_full_drive_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = on_disk(tmp_path, SMALL)
    before = [p.detach().clone() for p in training.model.parameters()]
    full = _raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"no room for a state .* No space left.*free some, or set"):
        training.train(range(1))
    for now, then in zip(training.model.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_of_the_drive_names_update_and_folder(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = on_disk(tmp_path, SMALL)
    training.train(range(1))
    monkeypatch.setattr(os, call, _raising(OSError(errno.EIO, os.strerror(errno.EIO))))
    told = rf"update\..* failed: a state .* rests on disk in {tmp_path} could not be .*Input/output"
    with pytest.raises(StepFailed, match=told):
        training.train(range(1, 2))
    monkeypatch.undo()
    with pytest.raises(StepFailed, match="earlier step failed while it updated"):
        training.train(range(1, 2))


def test_a_file_that_was_cut_off_is_told_and_not_read_as_zeros(tmp_path: Path) -> None:
    training = on_disk(tmp_path, SMALL)
    training.train(range(1))
    for file in training.on_disk:
        os.ftruncate(file.fd, 4096)
    with pytest.raises(StepFailed, match="could not be read: the file ends after 4096 bytes"):
        training.train(range(1, 2))
    for file in training.on_disk:  # else to compare or print a state would end the process
        os.ftruncate(file.fd, file.nbytes)


def test_parts_that_the_system_does_at_a_time_come_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read or write may do less than it was asked for, as where a signal comes."""
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, _half(getattr(os, name)))
    with_disk, without = on_disk(tmp_path, SMALL), Training(SMALL)
    for training in (with_disk, without):
        training.train(range(2))
    assert with_disk.on_disk
    assert_equal(with_disk, without)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"disk is .*must be a folder"):
        on_disk(tmp_path / "absent", SMALL).train(range(1))


def test_a_folder_without_leave_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = on_disk(tmp_path, SMALL)
    monkeypatch.setattr(os, "open", _raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(DiskError, match=r"no file can be made .*Read-only.*Nothing was updated"):
        training.train(range(1))


def test_where_reads_are_never_direct_it_says_so_and_trains_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.fcntl

    def refusing(fd: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    with_disk, without = on_disk(tmp_path, SMALL), Training(SMALL)
    for training in (with_disk, without):
        training.train(range(2))
    assert not any(file.is_direct for file in with_disk.on_disk)
    assert [r.message for r in caplog.records if "has no direct reads" in r.message]
    assert_equal(with_disk, without)


def test_files_have_no_name_where_the_file_system_has_none_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def named(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", named)
    training = on_disk(tmp_path, SMALL)
    training.train(range(1))
    assert training.on_disk
    assert not list(tmp_path.iterdir())


_ENDLESS = """
import sys
from pathlib import Path
from tests.graph.updates.test_states_on_disk import SMALL, on_disk
training = on_disk(Path(sys.argv[1]), SMALL)
training.train(range(1))
print(len(training.on_disk), flush=True)
training.train(range(1, 100_000))
"""


@pytest.mark.long
def test_nothing_is_left_of_processes_that_are_killed_in_one_folder(tmp_path: Path) -> None:
    """Two train in the same folder, each with files of its own, and end in the middle of a step."""
    command = [sys.executable, "-c", _ENDLESS, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert int(process.stdout.readline()) > 0
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert not list(tmp_path.iterdir())


def _raising(error: OSError) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _half(call: Callable[[int, list[memoryview], int], int]) -> Callable[..., int]:
    """`call` for the first of several blocks alone."""

    def some(fd: int, rooms: list[memoryview], offset: int) -> int:
        (room,) = rooms
        return call(fd, [room[: max(4096, len(room) // 2 // 4096 * 4096)]], offset)

    return some
