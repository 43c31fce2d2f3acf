"""Computer: the one at hand, measured, with a link that is slow beside its processor.

In: the folder of the demo. Out: a file of the machine that its steps are planned for and run on.

Host and device of the emulated device are one memory, so a copy between them costs next to nothing.
The demo's link is as slow beside the device's matmuls as a plan has to reckon with, whatever
processor the device is: every copy takes the time it would take there (option `throttle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from cotrain_compile import files
from cotrain_compile.machine import Link, Machine
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.first_use import QUICK
from cotrain_compile.runtime.calibrate.network_bench import ranks_here
from cotrain_compile.support import limits

# Such that a step of the demo takes longer to move all that it could than to compute.
FLOPS_PER_LINK_BYTE = 800
# An emulated copy takes that much however small it is: its thread is woken, and waits for Python.
LATENCY_S = 250e-6


@contextmanager
def device_and_host() -> Iterator[None]:
    """Within it half of the cores of this rank are the device, so that the host has the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, limits.usable_core_count() // ranks_here() // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured_computer(folder: Path) -> tuple[Machine, Path]:
    """This computer with the demo's link, and its file in `folder`; every rank has to call it."""
    found = calibrate(sizes=QUICK).machine
    link = Link(found.device.flops_per_s["float32"] / FLOPS_PER_LINK_BYTE, LATENCY_S)
    machine = found.but(h2d=link, d2h=link, duplex=2.0)
    path = folder / "machine.json"
    if dist.is_initialized():
        return _of_the_first_rank(machine, path), path
    files.save(machine, path)
    return machine, path


def _of_the_first_rank(machine: Machine, path: Path) -> Machine:
    if dist.get_rank() == 0:
        files.save(machine, path)
    dist.barrier()
    return files.load(path, Machine)
