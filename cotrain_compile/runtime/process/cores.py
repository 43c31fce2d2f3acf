"""Cores: on which cores of the computer a thread runs, with those that torch starts for it.

In: core numbers. A thread that torch starts to share work inherits the cores of the thread it works
for, so binding the threads of the host lane, before their first work, binds all of an update. The
kernel gives a thread memory of the node that it runs on, so what is bound to the cores of a node
has its memory there too.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cores:
    """The cores that work keeps to, and how many threads share it; none: as the system likes."""

    numbers: frozenset[int] = frozenset()
    threads: int = 0

    @staticmethod
    def one_thread_each(numbers: Iterable[int]) -> Cores:
        """As many threads as cores: they are for this work alone."""
        cores = frozenset(numbers)
        return Cores(cores, len(cores))


ANY_CORE = Cores()


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def bind_this_thread(cores: Cores) -> None:
    """Let the calling thread share its work among `cores.threads` threads, on those cores alone.

    No other thread notices, not even one that starts later.
    """
    if not cores.numbers:
        return
    try:
        os.sched_setaffinity(0, cores.numbers)
    except OSError as error:  # they were there when the options were read
        told = sorted(cores.numbers)
        warnings.warn(f"host_cores {told} are not used: {error.strerror}", stacklevel=1)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(cores.threads)
    # It is also noted for threads to come. From a thread that ends, the note is put back alone.
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()


def run_on(cores: Cores, work: Callable[[], object]) -> None:
    """Do `work` on `cores`, and return when it is done; the calling thread stays where it is."""
    if not cores.numbers:
        work()
        return
    with ThreadPoolExecutor(1, "cotrain-bound", bind_this_thread, (cores,)) as bound:
        bound.submit(work).result()
