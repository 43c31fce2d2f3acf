"""A copy of the process that traces for a card: it does not outlive the one that waits for it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cotrain_compile.capture.offline import forked
from cotrain_compile.capture.offline.forked import in_a_copy

# CPython from 3.12 on warns of every fork of a process with threads; that is what is tried here.
pytestmark = [
    pytest.mark.usefixtures("watchdog"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def is_at_work(process: int) -> bool:
    """Whether it runs; one that has ended may wait for its parent to take note."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def has_ended(process: int, within_s: float = 10.0) -> bool:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if not is_at_work(process):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_is_ended_ends_its_copy(number: signal.Signals) -> None:
    reads, writes = os.pipe()

    def trace() -> None:
        os.write(writes, f"{os.getpid()}\n".encode())
        # It would rather go on, as code of torch that comes to no line of Python.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)

    parent = os.fork()
    if parent == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            in_a_copy(trace)
        finally:
            os._exit(1)
    copy = int(os.read(reads, 100))
    os.close(reads)
    os.close(writes)
    try:
        assert is_at_work(copy)
        os.kill(parent, number)
        assert has_ended(parent)
        assert has_ended(copy)
    finally:
        for process in (parent, copy):
            if is_at_work(process):
                os.kill(process, signal.SIGKILL)
        os.waitpid(parent, 0)


def test_a_copy_whose_parent_ended_before_it_could_say_so_ends_itself() -> None:
    child = os.fork()
    if child == 0:
        try:
            forked._end_with(os.getpid())  # not the process that it is a child of
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == forked.ORPHAN
