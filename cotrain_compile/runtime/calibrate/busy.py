"""Busy: which share of the cores a process gets while other programs want them too.

In: nothing. Out: a share, and what to say of it: rates that were measured meanwhile are too low.
"""

from __future__ import annotations

import time

import torch

from cotrain_compile.support.limits import usable_core_count

_LOOK_S = 0.05
_ELEMENTS = 1 << 20
# A process by itself gets all but what its threads wait for one another.
_ENOUGH = 0.75


def share_of_cores() -> float:
    """The share, from 0 to 1, that this process gets of the cores that torch would use now.

    From the processor time of a computation on all of them; it takes a twentieth of a second.
    """
    threads = min(torch.get_num_threads(), usable_core_count())
    x = torch.ones(_ELEMENTS)
    out = torch.sin(x)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    while (taken_s := time.perf_counter() - start_s) < _LOOK_S:
        torch.sin(x, out=out)
    return min(1.0, (time.process_time() - start_cpu_s) / (taken_s * threads))


def is_busy(share: float) -> bool:
    """Whether others take so much that what is measured is not what the computer can do."""
    return share < _ENOUGH


def busy_remark(share: float) -> str:
    """What to know of rates that were measured with this share; "" where it was enough."""
    if not is_busy(share):
        return ""
    return (
        f"other programs were at work: this process got {share:.0%} of its cores, so that host "
        "rates and the cost of a task may be better than measured; calibrate again when it is quiet"
    )
