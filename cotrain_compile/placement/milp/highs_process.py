"""HiGHS in processes of its own, which can be ended at any moment.

A linear program in, HiGHS' answer out. HiGHS asks only at times whether it should stop: inside a
heuristic it may go on for its whole time limit, and a thread that is in it when Python ends takes
the program down. A process is killed instead: by Ctrl-C in the thread that waits for it, by a
`Stop` from another thread, and by the end of the program, however that ends.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import numpy as np

from cotrain_compile.placement.milp import highs_worker
from cotrain_compile.placement.milp.highs_worker import packed, received
from cotrain_compile.placement.milp.linear import Floats, LinearProgram

NOTHING: Mapping[int, float] = MappingProxyType({})
NO_END_S = 1e9


@dataclass(frozen=True)
class SolverAnswer:
    """What HiGHS found, by its own `status` in words of small letters.

    `values` are those of the columns, None where none obey all rows, as far as it got. `bound` is
    what no whole columns have less than, `done` how many pivots, steps of a barrier and checks of a
    tree it took.
    """

    status: str
    values: Floats | None
    objective: float
    bound: float
    done: Mapping[str, int]

    @property
    def is_stuck(self) -> bool:
        """Whether HiGHS was given up."""
        return self.status == highs_worker.STUCK

    @property
    def is_optimal(self) -> bool:
        return self.status == "optimal"

    @property
    def is_infeasible(self) -> bool:
        return "infeasible" in self.status


def has_highs() -> bool:
    """Whether it is installed."""
    return find_spec("highspy") is not None


def solve_elsewhere(
    program: LinearProgram,
    options: Mapping[str, float | int | str],
    limits: Mapping[str, int],
    *,
    whole: bool = True,
    fixed: Mapping[int, float] = NOTHING,
    start: Mapping[int, float] = NOTHING,
    patience_s: float = NO_END_S,
) -> SolverAnswer:
    """HiGHS' answer for `program`, where some columns are `fixed`, by number.

    `start` is what some of them can be together. `limits` are how many "pivots" and "barrier_steps"
    a program may take, or one with whole columns "checks"; without `whole` it has none. HiGHS
    is given up after `patience_s` of a processor. Raises RuntimeError where it fails, or is ended
    by a `Stop`.
    """
    matrix = program.matrix
    lower, upper = matrix.col_lower.copy(), matrix.col_upper.copy()
    lower[[*fixed]] = upper[[*fixed]] = [*fixed.values()]
    integrality = [column.is_whole for column in program.columns] if whole and program.whole else []
    message = {
        "options": dict(options),
        **limits,
        "patience_s": patience_s,
        **{field.name: getattr(matrix, field.name) for field in fields(matrix)},
        "col_lower": lower,
        "col_upper": upper,
        "integrality": np.array(integrality, dtype=np.int32),
        "start_index": np.array([*start], dtype=np.int32),
        "start_value": np.array([*start.values()], dtype=np.float64),
    }
    found = _asked(packed(message))
    if "error" in found:
        raise RuntimeError(found["error"])
    return SolverAnswer(
        found["status"],
        found["col_value"] if found["has_values"] else None,
        found["objective"],
        found["dual_bound"],
        {name: found[name] for name in ("pivots", "barrier_steps", "checks")},
    )


class Stop:
    """Ends what is being solved within it on any thread, and lets nothing new begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def now(self) -> None:
        """End it all. Does not wait."""
        with self._lock:
            self._stopped = True
            for process in self._busy:
                process.kill()

    @contextmanager
    def within(self) -> Iterator[None]:
        """What this thread solves meanwhile can be ended by `now`."""
        token = _stop.set(self)
        try:
            yield
        finally:
            _stop.reset(token)

    @contextmanager
    def watching(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """`process` is solving. Raises RuntimeError where nothing is to be solved any more."""
        with self._lock:
            if self._stopped:
                raise RuntimeError("the search for a plan was ended")
            self._busy.add(process)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(process)


_stop: ContextVar[Stop | None] = ContextVar("cotrain_stop_solving", default=None)


def current_stop() -> Stop:
    """What can end that which this thread solves."""
    return _stop.get() or Stop()


class _Processes:
    """Those that wait for work, of this process: a fork has none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._idle: list[subprocess.Popen[bytes]] = []

    def take(self) -> subprocess.Popen[bytes] | None:
        """One that waits for work, if any."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._idle = os.getpid(), []
            return self._idle.pop() if self._idle else None

    def give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._idle.append(process)

    def end(self) -> None:
        while (process := self.take()) is not None:
            _end(process)


_processes = _Processes()


def end_waiting() -> None:
    """End the processes that wait for work; others begin when there is some."""
    _processes.end()


atexit.register(end_waiting)


def _asked(program: bytes) -> dict[str, Any]:
    """The answer to `program`, by a process that is there, or by a new one."""
    while (waiting := _processes.take()) is not None:
        answer = _answer_of(waiting, program)
        if answer is not None:
            return answer  # else it had ended: nothing had come for long
    new = _started()
    answer = _answer_of(new, program)
    if answer is None:
        raise RuntimeError(f"HiGHS' process ended with status {new.returncode}")
    return answer


def _answer_of(process: subprocess.Popen[bytes], program: bytes) -> dict[str, Any] | None:
    """What `process` answers; None where it ends, too. It is ended by whatever is raised here."""
    answer, stop = None, current_stop()
    assert process.stdin
    assert process.stdout
    try:
        with stop.watching(process), suppress(BrokenPipeError):
            process.stdin.write(program)
            process.stdin.flush()
            answer = received(process.stdout)
    finally:
        if answer is None:
            _end(process)
        else:
            _processes.give_back(process)
    return answer


def _started() -> subprocess.Popen[bytes]:
    """A new process. In a session of its own, it does not see the Ctrl-C of our terminal."""
    if not sys.executable:
        raise RuntimeError("HiGHS needs a process, but the path of Python is not known")
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", highs_worker.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream
        with suppress(BrokenPipeError):  # what it had not read
            stream.close()
