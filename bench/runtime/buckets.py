"""What do buckets of small exchanges save? One step of two ranks, with them and one by one.

Two processes with gloo train many small layers. Both ways take turns, step by step; what is said is
the ratio of the medians of one run, as cores are shared with whatever else runs.

    python -m bench.runtime.buckets -o bench/results/buckets.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from bench.report import write_report
from cotrain_compile.capture.aten import bucket_exchanges

RANKS, LAYERS, STEPS = 2, 64, 30
WAYS = {"one by one": 0, "in buckets": bucket_exchanges.SMALL_BYTES}


class Gains(nn.Module):
    """Parameters of 8 kB each, and as good as nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(2048)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return x.sum()


def compiled_step(small_bytes: int) -> tuple[Callable[[Tensor], Tensor], int]:
    """A compiled step with exchanges up to `small_bytes` in buckets, and how many it begins."""
    model = DistributedDataParallel(Gains())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(step, backend="cotrain", options={"quiet": True, "policy": "resident"})
    with mock.patch.object(bucket_exchanges, "SMALL_BYTES", small_bytes):
        compiled(torch.ones(2048))
    dataflow = cotrain_compile.inspect(compiled).problem.dataflow
    return compiled, sum(op.collective is not None for op in dataflow.ops)


def train(rank: int, folder: str) -> None:
    """On one rank: seconds of every step, in turn with and without buckets."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    steps = {way: compiled_step(small) for way, small in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(STEPS):
        for way, (step, _) in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step(torch.ones(2048))
            seconds[way].append(time.perf_counter() - began)
    if rank == 0:
        found = {
            way: {"exchanges": steps[way][1], "median_s": statistics.median(taken)}
            for way, taken in seconds.items()
        }
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    lines = ["| exchanges | begun in a step | step (median) |", "|---|---|---|"]
    lines += [
        f"| {way} | {found['exchanges']} | {1e3 * found['median_s']:.1f} ms |"
        for way, found in result["ways"].items()
    ]
    return "\n".join(lines) + f"\n\nOne by one takes {result['ratio']:.1f} times as long."


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(train, (folder,), nprocs=RANKS)
        ways = json.loads(Path(folder, "found.json").read_text())
    first, last = (found["median_s"] for found in ways.values())
    result = {"ways": ways, "layers": LAYERS, "steps": STEPS, "ratio": first / last}
    print(table(result))
    write_report(given.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
