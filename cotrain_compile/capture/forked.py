"""Forked: work that changes torch for good, done in a copy of this process that then ends.

The copy has all that the caller has, as closures and modules; it hands back what can be pickled.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from cotrain_compile.errors import CaptureError

T = TypeVar("T")


def in_a_copy(work: Callable[[], T]) -> T:
    """What `work()` returns or raises, in a copy of this process."""
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Threads of torch rest while nothing is computed; no lock of theirs is held.
        warnings.simplefilter("ignore", DeprecationWarning)
        copy = os.fork()
    if copy == 0:
        os.close(reads)
        _work_and_end(work, writes)
    os.close(writes)
    with open(reads, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(copy, 0)
    if not told:
        code = os.waitstatus_to_exitcode(status)
        raise CaptureError(f"the process that traces for a card ended with {code} and no message")
    went_well, result = pickle.loads(told)
    if went_well:
        return result  # type: ignore[no-any-return]
    raise result


def _work_and_end(work: Callable[[], Any], writes: int) -> NoReturn:
    try:
        told = pickle.dumps((True, work()))
    except BaseException as error:
        told = _as_bytes(error)
    with open(writes, "wb") as pipe:
        pipe.write(told)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _as_bytes(error: BaseException) -> bytes:
    """The error itself, or its words where it cannot be handed over."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        told = pickle.dumps((False, error))
        pickle.loads(told)
    except Exception:
        return pickle.dumps((False, CaptureError(f"{type(error).__name__}: {error}")))
    return told
