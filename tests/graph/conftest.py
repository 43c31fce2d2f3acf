"""Every graph test starts with a Dynamo that has compiled nothing."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from cotrain_compile.viz.text import narrate

WATCHDOG_S = 120

# pytest listens to each logger that hands nothing on, and with a listener torch writes down every
# trace in full: some per cent of the time, and pages below each failure.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True, scope="module")
def freeze_what_stays() -> None:
    """Torch and what it has imported are a million objects, which each collection looks through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_line_of_a_slow_computer() -> None:
    """What is said while a step is compiled is the same on a busy computer."""
    narrate.EVERY_S = 1e6


@pytest.fixture(autouse=True, scope="session")
def no_guards_are_timed() -> Iterator[None]:
    """For a line of its log torch empties the processor's caches after each compile: 18 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def grad_mode_stays_on() -> Iterator[None]:
    """A step that fails or is interrupted leaves the user's grad mode as it was."""
    yield
    was_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_on


@pytest.fixture
def watchdog() -> Iterator[None]:
    """A step that hangs fails its test."""

    def bark(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {WATCHDOG_S} s")

    previous = signal.signal(signal.SIGALRM, bark)
    signal.alarm(WATCHDOG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than these small kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
