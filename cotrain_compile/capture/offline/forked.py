"""Forked: work that changes torch for good, done in a copy of this process that then ends.

The copy has all that the caller has, as closures and modules; it hands back what the connections
of `multiprocessing` can carry. Phases that it tells are told here. It ends with the caller,
whatever ends that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from cotrain_compile.errors import CaptureError
from cotrain_compile.support.phases import is_listened, tell_phase, told_to

T = TypeVar("T")

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
ORPHAN = 13  # exit code of a copy whose caller ended while it began


@dataclass(frozen=True)
class _Phase:
    """What the copy does from now on."""

    told: str


def in_a_copy(work: Callable[[], T]) -> T:
    """What `work()` returns or raises, in a copy of this process."""
    context = multiprocessing.get_context("fork")
    reads, writes = context.Pipe(duplex=False)
    copy = context.Process(target=_work_for, args=(os.getpid(), work, writes))
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Threads of torch rest while nothing is computed; no lock of theirs is held.
        warnings.simplefilter("ignore", DeprecationWarning)
        copy.start()
    writes.close()
    try:
        while isinstance(words := reads.recv(), _Phase):
            tell_phase(words.told)
        result = _received(reads)
    except EOFError:
        copy.join()
        raise CaptureError(
            f"the process that traces for a card ended with {copy.exitcode} and no message"
        ) from None
    except BaseException:  # as Ctrl-C: nobody waits for the copy any more
        copy.kill()
        copy.join()
        raise
    copy.join()
    if not words:
        return result  # type: ignore[no-any-return]
    raise result if isinstance(result, BaseException) else CaptureError(words)


def _work_for(caller: int, work: Callable[[], Any], writes: Connection) -> None:
    _end_with(caller)
    _tell(work, writes)


def _end_with(caller: int) -> None:
    """Let this process be killed when `caller`, which has forked it, ends.

    By a signal that no handler of the caller's, which it has a copy of, holds back. The kernel asks
    for the thread that has forked, which waits for this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != caller:  # it ended before it was asked for
        os._exit(ORPHAN)


def _received(reads: Connection) -> Any:
    """What comes next; None for an error that cannot be made again here."""
    try:
        return reads.recv()
    except EOFError:
        raise
    except Exception:
        return None


def _tell(work: Callable[[], Any], writes: Connection) -> None:
    """Send no words and what `work` returns; or what it raises, in words and as it is.

    Before that the phases of `work`, if anybody listens: a display of the caller's has no thread in
    a copy.
    """
    phases = told_to(lambda phase: writes.send(_Phase(phase))) if is_listened() else nullcontext()
    try:
        with phases:
            result = work()
    except BaseException as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        writes.send(f"{type(error).__name__}: {error}")
        try:
            writes.send(error)
        except Exception:
            writes.send(None)
    else:
        writes.send("")
        writes.send(result)
