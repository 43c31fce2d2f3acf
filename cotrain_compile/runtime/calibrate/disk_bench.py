"""Disk bench: what a drive keeps up as updates use it: direct reads and writes of whole pieces.

In: a folder. Out: a `Disk`. A new file is written as long as it takes to fill a drive's cache, or a
shorter one where a second is all that there is; then it is read, and then both at once.
"""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cotrain_compile.machine import Disk
from cotrain_compile.plan.on_disk import BLOCK_BYTES, PIECE_BYTES, THREADS
from cotrain_compile.runtime.disk.state_files import StateFile

Call = Callable[[StateFile, memoryview, int], None]

# Enough to take a second on a fast drive, and for a sustained rate.
QUICK_BYTES = 1 << 29
LONG_BYTES = 1 << 34
# At most of what is free: a calibration fills no drive.
FREE_SHARE = 0.25
_CALLS = 20


def measured_disk(folder: Path, nbytes: int = QUICK_BYTES) -> Disk:
    """The drive of `folder`, from about `nbytes` written and read. Raises `DiskError`."""
    usage = shutil.disk_usage(folder)
    pieces = max(2, int(min(nbytes, FREE_SHARE * usage.free)) // PIECE_BYTES)
    files = [StateFile(folder, pieces // 2 * PIECE_BYTES) for _ in range(2)]
    write_s = _seconds([(StateFile.write, file) for file in files])
    read_s = _seconds([(StateFile.read, file) for file in files])
    both_s = _seconds([(StateFile.read, files[0]), (StateFile.write, files[1])])
    moved = 2 * files[0].nbytes
    return Disk(
        capacity_bytes=usage.total,
        read_bytes_per_s=moved / read_s,
        write_bytes_per_s=moved / write_s,
        together=min(2.0, max(1.0, (read_s + write_s) / 2 / both_s)),
        latency_s=_latency_s(files[0]),
    )


def _seconds(calls: Sequence[tuple[Call, StateFile]]) -> float:
    """What it takes to do each of `calls` for all pieces of its file, side by side."""
    each = THREADS // len(calls)

    def do(call: Call, file: StateFile, number: int) -> None:
        with mmap.mmap(-1, PIECE_BYTES) as memory, memoryview(memory) as room:
            for start in range(number * PIECE_BYTES, file.nbytes, each * PIECE_BYTES):
                call(file, room, start)

    with ThreadPoolExecutor(THREADS) as threads:
        began_s = time.perf_counter()
        begun = [threads.submit(do, *call, number) for call in calls for number in range(each)]
        for done in begun:
            done.result()
        return time.perf_counter() - began_s


def _latency_s(file: StateFile) -> float:
    """Of one block read at a time."""
    with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as room:
        began_s = time.perf_counter()
        for number in range(_CALLS):
            file.read(room, number * PIECE_BYTES % file.nbytes)
        return (time.perf_counter() - began_s) / _CALLS
