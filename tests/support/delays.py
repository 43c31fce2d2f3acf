"""Delays: a schedule that the plan allows, made likely by letting threads sleep.

`random_delays` lets tasks begin late, and the device come late to issues and waits; `late` lets
one task begin long after all else could; `tasks_held_back` lets some begin when a test says so.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep

Sleep = Callable[[str], None]
PATIENCE_S = 60.0


@contextmanager
def random_delays(compiled: CompiledStep, rng: random.Random, most_s: float) -> Iterator[None]:
    """Within it, a third of all issues, waits and beginnings come up to `most_s` late."""

    def sleep(_: str) -> None:
        if rng.random() < 1 / 3:
            time.sleep(rng.random() * most_s)

    with _sleeping(compiled, on_device=sleep, on_lanes=sleep):
        yield


@contextmanager
def late(compiled: CompiledStep, task: str, seconds: float) -> Iterator[None]:
    """Within it, `task` begins so many seconds late."""

    def sleep(name: str) -> None:
        if name == task:
            time.sleep(seconds)

    with _sleeping(compiled, on_device=lambda _: None, on_lanes=sleep):
        yield


@contextmanager
def _sleeping(compiled: CompiledStep, *, on_device: Sleep, on_lanes: Sleep) -> Iterator[None]:
    device: Any = compiled._device

    def submitting(submit: Callable[..., Any]) -> Callable[..., Any]:
        def submit_late(
            name: str, work: Callable[[], object], after: Sequence[Any], *course: Any, **how: Any
        ) -> Any:
            def work_late() -> None:
                on_lanes(name)
                work()

            on_device(name)
            return submit(name, work_late, after, *course, **how)

        return submit_late

    def waiting(wait: Callable[..., Any]) -> Callable[..., Any]:
        def wait_late(tasks: Sequence[str]) -> None:
            on_device("wait")
            wait(tasks)
            on_device("wait")

        return wait_late

    with ExitStack() as patches:
        for lane in device._lanes.values():
            patches.enter_context(mock.patch.object(lane, "submit", submitting(lane.submit)))
        for name in ("wait", "wait_previous"):
            wait = waiting(getattr(device, name))
            patches.enter_context(mock.patch.object(device, name, wait))
        yield


@contextmanager
def tasks_held_back(compiled: CompiledStep, tasks: Collection[str]) -> Iterator[threading.Event]:
    """These tasks begin when the event is set: at the end, if not before."""
    gate = threading.Event()

    def behind_the_gate(name: str) -> None:
        assert name not in tasks or gate.wait(PATIENCE_S)

    with _sleeping(compiled, on_device=lambda _: None, on_lanes=behind_the_gate):
        try:
            yield gate
        finally:
            gate.set()
