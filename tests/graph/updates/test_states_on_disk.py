"""States on disk: trained as without, seen by torch as ever, and no fault of a drive is silent."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.entry.compiled import inspect
from cotrain_compile.errors import DiskError, OptionError, StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.disk.state_files import StateFile, file_of

pytestmark = pytest.mark.usefixtures("small_pieces")

# Of the last weight each state has one piece more than there are rooms, and they begin inside of
# its rows.
WIDTHS = (16, 1200, 1500)
# What the step takes of the host without a disk, of each byte of the weights: two states, the
# gradient, the weight on its way, and what an update makes where it runs op by op.
HELD = 8
IN_MEMORY: dict[str, Any] = {
    "machine": "rtx4090",
    "policy": "zero-offload",
    "memory_budget": "1GiB",
    "plan_cache": False,
    "quiet": True,
}


class Training:
    """Two layers, AdamW on them, and a step that clips."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
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
        return loss  # type: ignore[no-any-return]

    def train(self, steps: range) -> None:
        for step in steps:
            batch = torch.Generator().manual_seed(step)
            self.step(torch.randn(4, WIDTHS[0], generator=batch))

    @property
    def states(self) -> list[Tensor]:
        return [t for state in self.optimizer.state.values() for t in state.values()]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.states]

    @property
    def files(self) -> list[StateFile]:
        """The files in which states rest."""
        return [file for state in self.states if (file := file_of(state)) is not None]


def on_disk(folder: Path) -> Training:
    """A training that has not quite the room on the host for its states."""
    weights = sum(a * b * 4 for a, b in pairwise(WIDTHS))
    return Training(disk=folder, host_memory_budget=HELD * weights - (1 << 19))


def assert_equal(one: Training, other: Training) -> None:
    for a, b in zip(one.tensors, other.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_step_whose_states_rest_on_disk_is_the_same_step(tmp_path: Path) -> None:
    with_disk = on_disk(tmp_path)
    with_disk.train(range(3))
    assert len(with_disk.files) == 2  # those of the large weight
    assert not list(tmp_path.iterdir())
    # The host holds rooms in place of states.
    compiled = inspect(with_disk.step)
    assert compiled.measured is not None
    peaks, plan = compiled.measured.peak_bytes, compiled.plan
    assert peaks[Tier.HOST] <= plan.predicted.peak_bytes[Tier.HOST] <= plan.budgets[Tier.HOST]
    assert 0 < peaks[Tier.DISK] <= plan.predicted.peak_bytes[Tier.DISK]
    without = Training()
    without.train(range(3))
    assert not without.files
    assert_equal(with_disk, without)


def test_checkpoints_go_from_disk_to_memory_and_back(tmp_path: Path) -> None:
    """Saved in the middle of a training and loaded into others, each goes on alike."""
    path = tmp_path / "checkpoint.pt"
    first = on_disk(tmp_path)
    first.train(range(2))
    torch.save((first.model.state_dict(), first.optimizer.state_dict()), path)
    first.train(range(2, 4))
    others = on_disk(tmp_path), Training()
    for other in others:
        other.train(range(1))  # its states are at home, and are loaded into there
        files = other.files
        of_model, of_optimizer = torch.load(path)
        other.model.load_state_dict(of_model)
        other.optimizer.load_state_dict(of_optimizer)
        assert other.files == files
        other.train(range(2, 4))
        assert_equal(first, other)


def test_what_eager_code_writes_is_what_the_next_step_reads(tmp_path: Path) -> None:
    with_disk, without = on_disk(tmp_path), Training()
    for training in (with_disk, without):
        training.train(range(1))
        for state in training.states:
            state.mul_(0.5)
        training.train(range(1, 2))
    assert with_disk.files
    assert_equal(with_disk, without)


# Faults.


def test_a_full_drive_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = on_disk(tmp_path)
    before = [p.detach().clone() for p in training.model.parameters()]
    full = _raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        DiskError, match=r"no room for a tensor .* No space left.*free some, or set"
    ):
        training.train(range(1))
    for now, then in zip(training.model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_an_error_of_the_drive_names_update_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = on_disk(tmp_path)
    training.train(range(1))
    monkeypatch.setattr(os, "pwritev", _raising(OSError(errno.EIO, os.strerror(errno.EIO))))
    told = (
        rf"update\..* failed: a tensor .* rests on disk in {tmp_path} could not be .*Input/output"
    )
    with pytest.raises(StepFailed, match=told):
        training.train(range(1, 2))
    monkeypatch.undo()
    with pytest.raises(StepFailed, match="earlier step failed while it updated"):
        training.train(range(1, 2))


def test_a_file_that_was_cut_off_is_told_and_not_read_as_zeros(tmp_path: Path) -> None:
    training = on_disk(tmp_path)
    training.train(range(1))
    for file in training.files:
        os.ftruncate(file.fd, 4096)
    with pytest.raises(StepFailed, match="could not be read: the file ends after 4096 bytes"):
        training.train(range(1, 2))
    for file in training.files:  # else to compare or print a state would end the process
        os.ftruncate(file.fd, file.nbytes)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"'disk' is .*must be a folder"):
        on_disk(tmp_path / "absent").train(range(1))


def test_nothing_of_a_step_is_left_in_the_page_cache(tmp_path: Path) -> None:
    """It would count against the limit of a container, which no budget of a plan knows."""
    training = on_disk(tmp_path)
    training.train(range(2))
    there = [state for state in training.states if file_of(state) is not None]
    assert there
    assert not any(map(cached_bytes, there))
    assert there[0].sum().isfinite()  # who looks at one has it in the cache
    assert cached_bytes(there[0])


def cached_bytes(tensor: Tensor) -> int:
    """What the page cache holds of the file in which `tensor` rests (mincore(2))."""
    page, libc = os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * -(-tensor.nbytes // page))()
    address, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    if libc.mincore(address, length, pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return page * sum(byte & 1 for byte in pages)


_LIMITED = """
import resource, sys, threading
import torch
from tests.graph.updates import test_states_on_disk as tests
tests.WIDTHS = (16, *[2400] * 12)
threading.stack_size(1 << 18)  # stacks count as wholes
folder, allowed = sys.argv[1], int(sys.argv[2])
before = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
limit = 1024 * int(before.split()[1]) + allowed
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
options = {"disk": folder, "host_memory_budget": "440MiB"} if folder else {}
training = tests.Training(**options)
training.train(range(2))
print(len(training.files))
"""


@pytest.mark.long
def test_a_limit_of_the_system_holds_with_a_disk_and_not_without(tmp_path: Path) -> None:
    """As a container's would, but for shared memory, which rooms are, and the page cache.

    Weights and gradients take 500 MiB, the states, which are on disk, as much again.
    """
    folders, allowed = (str(tmp_path), ""), 850 << 20
    # What is freed goes back to the system, and is not held for other threads.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    ended = [
        subprocess.run(
            [sys.executable, "-c", _LIMITED, folder, str(allowed)],
            capture_output=True,
            text=True,
            env=environment,
        )
        for folder in folders
    ]
    assert ended[0].returncode == 0, ended[0].stderr
    assert int(ended[0].stdout) > 0
    assert ended[1].returncode != 0
    assert "t allocate memory" in ended[1].stderr


_ENDLESS = """
import sys
from pathlib import Path
import pytest
from tests.graph.updates.test_states_on_disk import on_disk
from tests.support.small_pieces import make_small
make_small(pytest.MonkeyPatch())
training = on_disk(Path(sys.argv[1]))
training.train(range(1))
print(len(training.files), flush=True)
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
