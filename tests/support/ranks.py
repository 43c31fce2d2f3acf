"""Ranks: processes that train together over gloo, kept for many cases, as a start is slow.

`Ranks(count)` starts them on the first `run`, which calls one function on every rank and returns
what each of them returned. The function is one at the top of a module, and so are its arguments'
classes: they travel by pickle.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

TIMEOUT_S = 240
# Of a collective: a rank that failed leaves the others waiting for so long at most.
_GROUP_TIMEOUT = datetime.timedelta(seconds=60)


class Ranks:
    """`count` processes of one gloo group, started when they are first needed."""

    def __init__(self, count: int, timeout_s: float = TIMEOUT_S) -> None:
        self.count = count
        self.timeout_s = timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns on each rank; fails the test where one raises."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(rank) for rank in range(self.count)]
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            self.stop()  # the others may be in a collective that nobody answers
            pytest.fail("\n".join(failed), pytrace=False)
        return [value for _, value in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _answer(self, rank: int) -> tuple[bool, Any]:
        pipe, process = self._pipes[rank], self._processes[rank]
        if not wait([pipe, process.sentinel], self.timeout_s):
            return False, f"no answer within {self.timeout_s:g} s"
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except EOFError:
            return False, f"the process has died with exit code {process.exitcode}"
        return answer

    def _start(self) -> None:
        # A server imports torch once; ranks are forks of it, without the state of this process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["tests.support.ranks", "cotrain_compile.entry.compile_step"]
        )
        port = free_port()
        for rank in range(self.count):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.count, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)


@contextmanager
def ranks(count: int, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """`count` ranks, stopped at the end."""
    started = Ranks(count, timeout_s)
    try:
        yield started
    finally:
        started.stop()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, count: int, port: int, pipe: Connection) -> None:
    """Join the group, then answer each function that comes with (True, result) or (False, why)."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=count, timeout=_GROUP_TIMEOUT
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
