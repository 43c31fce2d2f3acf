"""Seconds of the processor, and what a process is told so that all of its compilers are counted."""

from __future__ import annotations

import os
import time

# One compiler at a time, and as a child of the process, so that its seconds are counted.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Who keeps what from one process to the next.
CACHES = ("TORCHINDUCTOR", "COTRAIN")


def processor_s() -> float:
    """Seconds of the processor so far, compilers that were started included."""
    of_others = os.times()
    return time.process_time() + of_others.children_user + of_others.children_system
