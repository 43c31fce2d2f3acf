"""Cores: on which cores of the computer a thread runs, with those that torch starts for it.

In: core numbers. A thread that torch starts to share work inherits the cores of the thread it works
for, so binding the threads of the host lane, before their first work, binds all of an update.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Collection

import torch


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def bind_this_thread(cores: Collection[int]) -> None:
    """Let the calling thread share its work among as many threads as `cores`, on those alone.

    No other thread notices, not even one that starts later.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:  # they were there when the options were read
        warnings.warn(f"host_cores {sorted(cores)} are not used: {error.strerror}", stacklevel=1)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    # It is also noted for threads to come. From a thread that ends, the note is put back alone.
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()
