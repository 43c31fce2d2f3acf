"""First use: this computer as measured when a step was first planned for it, and kept on disk.

In: the device of a step. Out: a `Machine` at measured rates, from a file where an earlier process
has measured the same computer in the same settings, else from a calibration of some seconds,
which is said before it begins, and takes one sample of each figure where the computer is so busy
that its time is over. What was measured while others had its cores is kept for as long as they have
them. No step fails for being measured: the rates are guessed then, with a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from cotrain_compile import files, presets
from cotrain_compile.distribute.ranks import count_of_ranks
from cotrain_compile.errors import FormatError
from cotrain_compile.machine import Disk, Machine, Rates
from cotrain_compile.runtime.calibrate.busy import busy_remark, is_busy, share_of_cores
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.disk_bench import measured_disk
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.support import limits
from cotrain_compile.support.disk_cache import folder_of, keep_at_most, package_digest
from cotrain_compile.support.phases import is_listened, tell_phase

# Beyond the caches of any processor, and few enough repeats to take some seconds.
# Two samples of each figure: of ops they are as near to those of eleven as three are, 3 %.
QUICK = Sizes(copy_bytes=2**26, matmul_side=1024, updated_parameters=2**23, repeats=2)
# What has not been sampled by then is sampled once.
SAMPLING_S = 5.0
MOST_BYTES = 1 << 20
# What is said goes where the rest of a compile does, which sets the logger up.
LOG = logging.getLogger("cotrain_compile")


def measured_machine(device: torch.device) -> Machine | None:
    """This computer with `device`, at measured rates; None where it is not to be measured.

    Where nothing is kept on disk every process would measure anew, and several ranks would measure
    one another.
    """
    folder = folder_of("machines")
    if folder is None or count_of_ranks() > 1:
        return None
    return _kept_or_measured(device, folder / f"{_digest(device)}.json")


@cache
def measured_drive(folder: str) -> Disk:
    """The drive of `folder`, at rates of a second or two; once a process. Raises `DiskError`."""
    tell_phase("measuring the drive")
    return measured_disk(Path(folder))


@cache
def _kept_or_measured(device: torch.device, path: Path) -> Machine | None:
    """The same all through a process: a step that is planned again is so for the same machine."""
    of_busy = path.with_suffix(".busy.json")
    kept = _kept(path)
    if kept is None and (kept := _kept(of_busy)) and not is_busy(share_of_cores()):
        kept = None
    if kept is not None:
        return kept
    tell_phase("measuring this computer")
    if is_listened():  # nobody who wants silence listens
        LOG.info("cotrain: measuring this computer, once: some seconds, more on a busy one")
    quick = replace(QUICK, until_s=time.monotonic() + SAMPLING_S)
    try:
        with _as_torch_begins(device):
            found = calibrate(device=str(device), sizes=quick)
    except torch.OutOfMemoryError:
        _warn_of_a_guess(f"{device} has no room to be measured", "free memory on it")
        return None
    except (RuntimeError, ValueError, ArithmeticError) as error:
        _warn_of_a_guess(f"{device} could not be measured ({error})", "try again")
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what it was measured with is no part of the step
    machine = replace(found.machine, name=presets.THIS_MACHINE)
    if is_busy(found.share) and is_listened():
        LOG.info("cotrain: %s", busy_remark(found.share))
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(machine, of_busy if is_busy(found.share) else path)
        keep_at_most(path.parent, MOST_BYTES)
    return machine


def _kept(path: Path) -> Machine | None:
    with suppress(FormatError, OSError):
        kept = files.load(path, Machine)
        if kept.has_one_device and kept.rates is Rates.MEASURED:
            return kept
    return None


def _warn_of_a_guess(why: str, way_on: str) -> None:
    warnings.warn(
        f"cotrain: {why}, so its rates are guessed; {way_on}, or give the option machine a file "
        "of `cotrain-compile calibrate`",
        stacklevel=4,
    )


def _digest(device: torch.device) -> str:
    """Of the computer, and of all that its rates depend on."""
    card = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
    parts = (
        str(device),
        card,
        platform.node(),
        str(limits.usable_core_count()),
        str(limits.usable_memory_bytes()),
        str(torch.get_num_threads()),
        str(os.environ.get("CUDA_VISIBLE_DEVICES")),
        torch.__version__,
        package_digest(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@contextmanager
def _as_torch_begins(device: torch.device) -> Iterator[None]:
    """Within it new tensors are of float32 on the CPU, whatever the program has set.

    After it the program's card is current again, if `device` is another.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
