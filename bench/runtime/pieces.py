"""What does it gain to copy, update and bring back a large parameter in pieces?

A step that is next to nothing but an embedding updated on the host, on the emulated device with
throttled links: whole, and in pieces. Both take turns in one process, and of each the fastest step
counts. Beside it is what the processor takes for a tiny copy that is a task of its own, and for one
of several that a task makes: what bundling of tasks could gain.

    python -m bench.runtime.pieces -o bench/results/pieces.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import cotrain_compile
from bench.report import write_report
from cotrain_compile import files
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.machine import MEMORIES, Link, Tier
from cotrain_compile.plan import Lane
from cotrain_compile.presets import THIS_MACHINE, find
from cotrain_compile.runtime.course import WHOLE
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host import pieces
from cotrain_compile.runtime.ops import Launch

ROWS, WIDTH, CLASSES = 32_000, 768, 16
LINK = Link(1e9, latency_s=250e-6)
ROUNDS = 8
COPIES, BUNDLES = 400, (1, 4, 16)


def compiled_step(piece_bytes: int, machine: Path) -> tuple[Callable[[], object], CompiledStep]:
    """A step with its parameters in pieces of `piece_bytes`, which has run once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words, classes = torch.randint(ROWS, (2, 64)), torch.randint(CLASSES, (2, 64))

    def step(words: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(words).flatten(0, 1), classes.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"policy": "coarse", "machine": str(machine), "throttle": True, "poison": False}
    compiled = torch.compile(step, backend="cotrain", options={**options, "quiet": True})
    with mock.patch.object(pieces, "PIECE_BYTES", piece_bytes):
        compiled(words, classes)
    return lambda: compiled(words, classes), cotrain_compile.inspect(compiled)


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that `run()` takes by `clock`."""
    began_s = clock()
    run()
    return clock() - began_s


def measured_pieces() -> dict[str, Any]:
    """Seconds of a step, whole and in pieces."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / "machine.json"
        throttled = find(THIS_MACHINE).but(d2h=LINK, h2d=LINK)
        files.save(throttled, machine)
        whole, _ = compiled_step(1 << 62, machine)
        cut, compiled = compiled_step(pieces.PIECE_BYTES, machine)
    whole_s, cut_s = [], []
    for _ in range(ROUNDS):
        whole_s.append(seconds(whole))
        cut_s.append(seconds(cut))
    nbytes = ROWS * WIDTH * 4
    assert compiled._device._piecewise
    return {
        "parameter_bytes": nbytes,
        "piece_bytes": pieces.PIECE_BYTES,
        "link_s": throttled.copy_s(nbytes, Tier.HOST, Tier.DEVICE),
        "whole_s": min(whole_s),
        "in_pieces_s": min(cut_s),
    }


def measured_bundles() -> dict[str, float]:
    """Processor microseconds of a tiny copy to the host, by the copies that a task makes."""
    device = EmulatedDevice(find(THIS_MACHINE), dict.fromkeys(MEMORIES, 1 << 40), {}, poison=False)
    sources = [torch.ones(64) for _ in range(COPIES)]

    def run(size: int) -> None:
        device.start_step()
        names = []
        for number in range(0, COPIES, size):
            part = sources[number : number + size]
            made = [torch.empty_like(source) for source in part]
            for copy in made:
                device.meter.track(copy, Tier.HOST, "a copy")
            names.append(f"bundle {number}")
            work = _copier(device, made, part)
            device._submit(Lane.D2H, Launch(names[-1]), work, (), WHOLE)
        device.wait(names)

    return {
        f"bundles of {size}": min(
            seconds(lambda size=size: run(size), time.process_time)  # type: ignore[misc]
            for _ in range(ROUNDS)
        )
        * 1e6
        / COPIES
        for size in BUNDLES
    }


def _copier(
    device: EmulatedDevice, made: list[torch.Tensor], sources: list[torch.Tensor]
) -> Callable[[], None]:
    def copy() -> None:
        for to, source in zip(made, sources, strict=True):
            device._copy(Lane.D2H, to, source, time.perf_counter())

    return copy


def main() -> None:
    """Measure both and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {"pieces": measured_pieces(), "cpu_us_a_tiny_copy": measured_bundles()}
    Console(soft_wrap=True).print(result)
    if arguments.output:
        write_report(arguments.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
