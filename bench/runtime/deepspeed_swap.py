"""DeepSpeed's way to update what rests on a drive: its `async_io`, in the order of its swapper.

Parameters and their states are files of their own. While one is updated the next one is read, and
the one before is written (`PipelinedOptimizerSwapper`, with `pipeline_read` and `pipeline_write`).
The arithmetic is ATen's fused loop, as in the other measurements of `bench.runtime.disk`.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch

NAMES = ("param", "exp_avg", "exp_avg_sq")
# Its defaults, and what its page on NVMe offload and its tuner go up to.
SETTINGS = {"defaults": (8, 1), "tuned": (32, 8)}
BLOCK_BYTES = 1 << 20


def async_io() -> Any:
    """The module of C++ with its handles, built on first use; None where DeepSpeed is not here."""
    try:
        builders = importlib.import_module("deepspeed.ops.op_builder")
    except ImportError:
        return None
    return builders.AsyncIOBuilder().load(verbose=False)


class Swapper:
    """`count` parameters of `elements` float32 in `folder`, with `depth` requests a thread."""

    def __init__(
        self, module: Any, folder: Path, count: int, elements: int, settings: tuple[int, int]
    ) -> None:
        depth, threads = settings
        self._reading, self._writing = (
            module.aio_handle(BLOCK_BYTES, depth, False, True, threads) for _ in range(2)
        )
        self._count, self._folder = count, folder
        row = torch.empty(0)
        # One set is read, one updated, one written; in memory that is locked, as there.
        self._sets = [
            [self._reading.new_cpu_locked_tensor(elements, row).zero_() for _ in NAMES]
            for _ in range(3)
        ]
        self._gradient, self._step = torch.zeros(elements), torch.ones(())
        for number in range(count):
            self._write(number)
            self._writing.wait()

    def __enter__(self) -> Swapper:
        return self

    def __exit__(self, *_: object) -> None:
        for own in self._sets:
            for tensor in own:
                self._reading.free_cpu_locked_tensor(tensor)
        for number in range(self._count):
            for name in NAMES:
                self._path(number, name).unlink()

    def update_s(self) -> float:
        """Seconds for the update of all."""
        began_s = time.perf_counter()
        self._read(0)
        is_writing = False
        for number in range(self._count):
            self._reading.wait()
            if number + 1 < self._count:
                self._read(number + 1)
            weight, first, second = self._sets[number % 3]
            torch._fused_adamw_(
                [weight], [self._gradient], [first], [second], [], [self._step],
                lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip
            if is_writing:
                self._writing.wait()
            self._write(number)
            is_writing = True
        self._writing.wait()
        return time.perf_counter() - began_s

    def _path(self, number: int, name: str) -> Path:
        return self._folder / f"{number}.{name}.swp"

    def _read(self, number: int) -> None:
        for name, tensor in zip(NAMES, self._sets[number % 3], strict=True):
            self._reading.async_pread(tensor, str(self._path(number, name)), 0)

    def _write(self, number: int) -> None:
        for name, tensor in zip(NAMES, self._sets[number % 3], strict=True):
            self._writing.async_pwrite(tensor, str(self._path(number, name)), 0)
