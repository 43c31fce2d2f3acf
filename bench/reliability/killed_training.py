"""A training that is killed: a process that trains, saves checkpoints, and goes on from the last.

In: a `Job`. Out: its checkpoint, written every few steps; and over a pipe that it is running, and
what a signal's exception has left of its state. It is made of `docs/examples/plain_loop.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What is loaded once for all processes, which are forked from one that has.
import cotrain_compile.entry.compile_step

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "plain_loop.py"
SAVE_EVERY = 5
READY, RUNNING = "ready", "running"
STOPPED = 9
WAYS: dict[str, dict[str, Any]] = {
    "updates on the host": {"policy": "zero-offload"},
    "streamed": {"policy": "streamed"},
    "overlapping steps": {"policy": "zero-offload", "overlap_steps": True},
}


@dataclass(frozen=True)
class Job:
    """Train up to step `steps` in one of `WAYS`, from `checkpoint` if it is there.

    `log` is where the process writes its errors. With `handles_sigterm` that signal raises an
    exception, as Ctrl-C does.
    """

    checkpoint: Path
    steps: int
    way: str
    handles_sigterm: bool = False

    @property
    def log(self) -> Path:
        return self.checkpoint.with_suffix(".log")


class Stopped(Exception):
    """A signal's exception after so many steps, or in the next; `state` is what it has left."""

    def __init__(self, done: int, state: str) -> None:
        super().__init__(done, state)


@dataclass(frozen=True)
class Training:
    """The example's network and optimizer, placed; `parts` are what a checkpoint holds."""

    parts: dict[str, Any]
    step: Callable[[Tensor, Tensor], Tensor]


def load_example() -> ModuleType:
    """`docs/examples/plain_loop.py` as a module."""
    spec = importlib.util.spec_from_file_location("plain_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_training(example: ModuleType, way: str) -> Training:
    """The same from the same start, but for how it is placed."""
    torch.manual_seed(0)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    options = {"host_kernels": "captured", "quiet": True, **WAYS[way]}
    compiled = torch.compile(step, backend="cotrain", options=options)
    return Training({"model": model, "optimizer": optimizer}, compiled)


def train(job: Job, after_step: Callable[[int, Training], None]) -> None:
    """`after_step` is told how many steps are done, by this process or one before it."""
    torch.set_num_threads(1)
    example = load_example()
    training = make_training(example, job.way)
    done = 0
    if job.checkpoint.exists():
        done = example.load_checkpoint(job.checkpoint, training.parts)
    try:
        while done < job.steps:
            training.step(*example.batch_of(done))
            done += 1
            after_step(done, training)
            if done % SAVE_EVERY == 0:
                example.save_checkpoint(job.checkpoint, training.parts, done)
    except (KeyboardInterrupt, SystemExit) as signalled:
        raise Stopped(done, left_by(training.parts)) from signalled


def left_by(parts: dict[str, Any]) -> str:
    """Digest of parameters and states, whatever step they are of."""
    cotrain_compile.synchronize()
    return digest({name: part.state_dict() for name, part in parts.items()})


def digest(saved: Any) -> str:
    """Of every tensor in a nest of dictionaries and lists, to the bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors_in(saved)):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def tensors_in(saved: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path."""
    if isinstance(saved, Tensor):
        yield name, saved
    elif isinstance(saved, dict):
        for key, value in saved.items():
            yield from tensors_in(value, f"{name}/{key}")
    elif isinstance(saved, list | tuple):
        for position, value in enumerate(saved):
            yield from tensors_in(value, f"{name}/{position}")


def run(job: Job, told: Connection) -> None:
    """The whole process. It tells `READY`, `RUNNING` after its first step, and what stopped it.

    It ends with `STOPPED` where a signal's exception has ended it.
    """
    sys.stderr = job.log.open("w")

    def after_step(done: int, training: Training) -> None:
        if news:
            told.send(news.pop())

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if job.handles_sigterm:
            signal.signal(signal.SIGTERM, _leave)
        told.send(READY)
        news = [RUNNING]
        train(job, after_step)
    except Stopped as stopped:
        told.send(stopped.args)
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        sys.exit(STOPPED)


def run_whole(job: Job, told: Connection) -> None:
    """The same, undisturbed: tells the digest of the state after each step."""
    states: list[str] = []
    train(job, lambda done, training: states.append(left_by(training.parts)))
    told.send(states)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(STOPPED)
