"""Faults of ranks: one of several that train together fails, and how the others end.

`inject` starts the ranks anew, lets one `Fault` into one of them, and returns what each of the
others came to: an error, the end of its training, or nothing within the time that it has.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from cotrain_compile.backends.eager.program import EagerProgram
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.dry_run import AfterDryRun
from cotrain_compile.entry import compile_step as compiling
from cotrain_compile.errors import CotrainError, OutOfDeviceMemory
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph.collectives import is_collective, is_wait
from cotrain_compile.machine import Tier
from tests.support.faults_of_plans import PLANS, Point, train_by_plan
from tests.support.ranks import free_port

HOWS = ("raise", "exit", "kill", "hang", "stop")
PLACES = (
    "before the first plan",
    "in a dry run",
    "in a replan",
    "before an exchange",
    "after an exchange began",
    "in a checkpoint",
)
MODELS = ("ddp", "shard", "fully_shard")  # of steps; PLANS are other ways to train
STEPS, FAULTY_STEP = 4, 2
# Beside the timeout of the group: for starting, compiling, and the processor that others use.
PATIENCE_S = 120.0
READY = "ready"


@dataclass(frozen=True)
class Fault:
    """`rank` of `ranks` fails in one of `HOWS` at one of `PLACES`, at exchange `number` there."""

    how: str
    place: str
    model: str = "ddp"
    ranks: int = 2
    rank: int = 1
    number: int = 0
    timeout_s: float = 4.0


@dataclass(frozen=True)
class End:
    """How a rank ended: `kind` is "" at the end of its training, else the name of an error.

    `is_ours` says whether that is one of this package, `seconds` how long after the fault it came.
    """

    rank: int
    kind: str
    told: str
    is_ours: bool
    seconds: float


class NotReached(Exception):
    """The rank that was to fail ended, or came to no end, before its fault."""


class _Raised(Exception):
    """What a rank that raises raises."""


def inject(fault: Fault) -> list[End]:
    """How the other ranks ended; one that came to no end has the kind "hung".

    Raises `NotReached` where the fault was not let in, as on a machine too busy to start in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes, pipes, port = [], [], free_port()
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(fault.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_train, args=(fault, rank, port, theirs, folder))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        try:
            _let_all_begin(fault, pipes)
            return list(_ends(fault, pipes))
        finally:
            for process in processes:
                process.kill()
                process.join()


def _let_all_begin(fault: Fault, pipes: list[Connection]) -> None:
    """Once every rank has started: on a busy machine that takes longer than the timeout."""
    if not all(_hear(pipe, PATIENCE_S) == READY for pipe in pipes):
        raise NotReached(f"{fault}: a rank did not start")
    for pipe in pipes:
        pipe.send(READY)


def _ends(fault: Fault, pipes: list[Connection]) -> Iterator[End]:
    failed_s = _hear(pipes[fault.rank], PATIENCE_S)
    if not isinstance(failed_s, float):
        raise NotReached(f"{fault}: {failed_s}")
    for rank, pipe in enumerate(pipes):
        if rank == fault.rank:
            continue
        told = _hear(pipe, fault.timeout_s + PATIENCE_S)
        if told is None:
            yield End(rank, "hung", "", False, 0.0)
        else:
            ended_s, kind, text, is_ours = told
            yield End(rank, kind, text, is_ours, max(0.0, ended_s - failed_s))


def _hear(pipe: Connection, seconds: float) -> Any:
    try:
        return pipe.recv() if wait([pipe], seconds) else None
    except EOFError:
        return time.monotonic(), "died", "", False


def _train(fault: Fault, rank: int, port: int, pipe: Connection, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pipe.send(READY)
    pipe.recv()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group(
        "gloo",
        rank=rank,
        world_size=fault.ranks,
        timeout=datetime.timedelta(seconds=fault.timeout_s),
    )
    try:
        if fault.model in PLANS:
            train_by_plan(
                fault.model,
                Point(fault.place, FAULTY_STEP, fault.number),
                STEPS,
                _failing(fault, rank, pipe),
            )
        else:
            with _faulty(fault, rank, pipe):
                _steps(fault, folder)
    except _Raised:
        return
    except BaseException as error:  # as torch's of a checkpoint is
        told = str(error), isinstance(error, CotrainError)
        pipe.send((time.monotonic(), type(error).__name__, *told))
    else:
        pipe.send((time.monotonic(), "", "", False))


def _steps(fault: Fault, folder: str) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    ways: dict[str, Any] = {
        "ddp": DistributedDataParallel,
        "shard": cotrain_compile.shard,
        "fully_shard": fully_shard,
    }
    model = ways[fault.model](net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    run: Any = torch.compile(step, backend="cotrain", options={"quiet": True, "policy": "greedy"})
    for number in range(STEPS):
        run(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))
        if number == FAULTY_STEP and fault.place == "in a checkpoint":
            of_model, of_optimizer = get_state_dict(model, optimizer)
            save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


@contextmanager
def _faulty(fault: Fault, rank: int, pipe: Connection) -> Iterator[None]:
    """Within it, the rank of the fault fails at its place; all plan again where that is in one."""
    fail = _failing(fault, rank, pipe)

    def first(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            fail()
            return original(*args, **kwargs)

        return run

    patch: Any
    match fault.place:
        case "before the first plan":
            patch = mock.patch.object(compiling, "extract", first(extract))
        case "in a dry run":
            patch = mock.patch.object(CompiledStep, "dry_run", first(CompiledStep.dry_run))
        case "in a replan":
            patch = mock.patch.multiple(
                AfterDryRun,
                _out_of_memory=_short_of_memory,
                _plans_again=first(AfterDryRun._plans_again),
            )
        case "in a checkpoint":
            write = first(FileSystemWriter.write_data)
            patch = mock.patch.object(FileSystemWriter, "write_data", write)
        case _:
            after = fault.place == "after an exchange began"
            patch = mock.patch.multiple(EagerProgram, **_at_exchange(fault.number, after, fail))
    with patch:
        yield


def _failing(fault: Fault, rank: int, pipe: Connection) -> Callable[[], None]:
    """What fails on the rank of the fault, and says when."""

    def fail() -> None:
        if rank == fault.rank:
            pipe.send(time.monotonic())
            fail_by(fault.how, fault.timeout_s)

    return fail


def fail_by(how: str, timeout_s: float) -> None:
    """Fail as `how` says, in this process."""
    match how:
        case "raise":
            raise _Raised
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":  # as a machine that swaps or is cut off: its connections stay
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            time.sleep(3 * timeout_s + PATIENCE_S)


def _short_of_memory(self: AfterDryRun, inputs: Any) -> Exception:
    del self, inputs
    return OutOfDeviceMemory("a rank has too little", tier=Tier.DEVICE)


def _at_exchange(number: int, after: bool, fail: Callable[[], None]) -> dict[str, Any]:
    """Methods of a program that fail at exchange `number` of a step in the middle.

    Before it begins, or in the wait for it.
    """
    wanted, seen, steps = (is_wait if after else is_collective), itertools.count(), [0]
    run_step, carry_out = EagerProgram.run_step, EagerProgram._carry_out

    def run(self: EagerProgram, inputs: Any, *, dry_run: bool = False) -> Any:
        steps[0] += not dry_run
        return run_step(self, inputs, dry_run=dry_run)

    def carry(self: EagerProgram, call: Any) -> Any:
        in_the_middle = not self._is_dry_run and steps[0] == FAULTY_STEP
        if in_the_middle and wanted(call.node) and next(seen) == number:
            fail()
        return carry_out(self, call)

    return {"run_step": run, "_carry_out": carry}
