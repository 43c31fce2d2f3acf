"""Does a killed training lose anything? Signals at random times; then the training goes on.

python -m bench.reliability.processes --minutes 30 -o bench/results/reliability_processes.json

A case is one process, which is sent one signal: in a quarter of them while it starts and compiles,
else while it trains. It holds if the process ends by the signal and soon, its exception has left
the state of a whole step, and the last checkpoint is, to the bit, the state of a run that nobody
disturbed. The next process goes on from there; where the training comes to its end, another begins.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.reliability.killed_training import (
    READY,
    RUNNING,
    STOPPED,
    WAYS,
    Job,
    digest,
    run,
    run_whole,
)
from bench.report import write_report

STEPS = 250
# Signals come within so many seconds: of compiling, or of steps and checkpoints.
COMPILING_S, RUNNING_S = 3.0, 0.4
PATIENCE_S = 120.0
# Forked from a process that has loaded torch, and run nothing.
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["bench.reliability.killed_training"])


@dataclass(frozen=True)
class Kill:
    """A signal, whether the training handles it, and how its process has to end then."""

    number: signal.Signals
    ends_with: int
    handled: bool = False

    def __str__(self) -> str:
        return f"{self.number.name}{', handled' if self.handled else ''}"


KILLS = (
    Kill(signal.SIGKILL, -signal.SIGKILL),
    Kill(signal.SIGTERM, -signal.SIGTERM),
    Kill(signal.SIGTERM, STOPPED, handled=True),
    Kill(signal.SIGINT, STOPPED, handled=True),
)


@dataclass
class Figures:
    """What came of the cases so far."""

    kinds: Counter[str] = field(default_factory=Counter)
    starting: int = 0
    late: int = 0
    trainings: int = 0
    stopped_states: int = 0
    broken: list[dict[str, Any]] = field(default_factory=list)


class Broken(Exception):
    """A promise that a case has shown to be broken."""


def undisturbed(job: Job) -> list[str]:
    """The state after each step of a training that nobody disturbs; first, one of no step."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=run_whole, args=(job, theirs))
    process.start()
    states: list[str] = ours.recv()
    process.join()
    return ["", *states]


def kill_once(job: Job, kill: Kill, rng: random.Random, states: list[str], seen: Figures) -> bool:
    """One case; whether the process came to the end of its training first."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=run, args=(replace(job, handles_sigterm=kill.handled), theirs))
    process.start()
    theirs.close()
    try:
        _wait_for_the_moment(ours, rng, seen)
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(process.pid, kill.number)
        process.join(PATIENCE_S)
        if process.is_alive():
            raise Broken(f"still running {PATIENCE_S:.0f} s after {kill}")
        if process.exitcode not in (0, kill.ends_with):
            raise Broken(f"ended with {process.exitcode}: {job.log.read_text()[-400:]}")
    finally:
        process.kill()
    _check_stopped(ours, states, seen)
    check_checkpoint(job, states)
    return process.exitcode == 0


def _wait_for_the_moment(told: Connection, rng: random.Random, seen: Figures) -> None:
    """Return at a random time: while the process compiles, or after its first step."""
    _hear(told, READY)
    if rng.random() < 1 / 4:
        seen.starting += 1
        time.sleep(rng.random() * COMPILING_S)
    else:
        _hear(told, RUNNING)
        time.sleep(rng.random() * RUNNING_S)


def _hear(told: Connection, expected: str) -> None:
    try:
        heard = told.recv() if told.poll(PATIENCE_S) else f"nothing in {PATIENCE_S:.0f} s"
    except EOFError:
        heard = "its end"
    if heard != expected:
        raise Broken(f"{heard} came from a process in place of {expected!r}")


def _check_stopped(told: Connection, states: list[str], seen: Figures) -> None:
    """What the signal's exception has left is the state of a whole step: the last, or the next."""
    with suppress(EOFError):
        while told.poll():
            heard = told.recv()
            if heard == RUNNING:
                continue
            done, state = heard
            seen.stopped_states += 1
            if done and state not in states[done : done + 2]:
                raise Broken(f"the exception left neither the state of step {done} nor the next")


def check_checkpoint(job: Job, states: list[str]) -> None:
    """The checkpoint, if there is one, is the state of the undisturbed training at its step."""
    if job.checkpoint.exists():
        saved = torch.load(job.checkpoint)
        if (
            digest({"model": saved["model"], "optimizer": saved["optimizer"]})
            != states[saved["done"]]
        ):
            raise Broken(f"the checkpoint is not the state after {saved['done']} steps")


def campaign(seconds: float, first: int, folder: Path, report: Callable[[Figures], None]) -> None:
    """Kill processes until the time is over, of each training in turn; `report` after each."""
    states = {way: undisturbed(Job(folder / f"{way}.pt", STEPS, way)) for way in WAYS}
    seen, end_s = Figures(), time.monotonic() + seconds
    jobs = cycle([Job(folder / f"{number}.pt", STEPS, way) for number, way in enumerate(WAYS)])
    for seed, job in zip(count(first), jobs, strict=False):
        if time.monotonic() > end_s:
            return
        rng = random.Random(seed)
        kill = rng.choice(KILLS)
        try:
            is_whole = kill_once(job, kill, rng, states[job.way], seen)
        except Broken as broken:
            seen.broken.append({"seed": seed, "what": f"{kill}, {job.way}: {broken}"})
            job.checkpoint.unlink(missing_ok=True)
            is_whole = False
        seen.kinds[str(kill)] += 1
        if is_whole:
            seen.late += 1
            seen.trainings += 1
            job.checkpoint.unlink()
        report(seen)


def main() -> None:
    """Run a campaign and write its figures, also of one that is stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began_s = time.monotonic()

    def report(seen: Figures) -> None:
        cases = seen.kinds.total()
        result = {
            "campaign": "signals to training processes, which go on from their last checkpoint",
            "cases": cases,
            "held": cases - len(seen.broken),
            "refused": 0,
            "faults": cases - seen.late,
            "broken": seen.broken,
            "minutes": round((time.monotonic() - began_s) / 60, 1),
            "kinds": dict(seen.kinds),
            "first_seed": asked.first,
            "while_compiling": seen.starting,
            "states_left_by_exceptions": seen.stopped_states,
            "trainings_finished": seen.trainings,
        }
        write_report(asked.output, (__doc__ or "").splitlines()[0], result)

    with tempfile.TemporaryDirectory() as folder:
        campaign(60 * asked.minutes, asked.first, Path(folder), report)


if __name__ == "__main__":
    main()
