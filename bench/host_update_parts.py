"""What do parts that stay in the cache save an update without a fused loop?

AdamW on one tensor, in float32 and in bfloat16: the captured ops whole, the same ops in parts, and
in float32 ATen's fused loop as well. They run in turn, round by round, in one process. In bfloat16
there is no loop: it would round once where the ops round each time.

    python -m bench.host_update_parts -o host_update_parts.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, fx, nn

from bench.host_update import REPEATS, UNLIMITED, Case, placed_step
from bench.report import write_report
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.captured_kernels import CapturedKernel, ChunkedKernel, chunked_kernel
from cotrain_compile.runtime.host_kernels import FusedKernel, HostKernel, host_kernels
from cotrain_compile.runtime.meter import Meter
from cotrain_compile.runtime.metered import MeteredGraph

SIZE, QUICK_SIZE = (2048, 4096), (512, 1024)


def kernels(region: fx.GraphModule, chosen: HostKernel) -> Iterator[tuple[str, HostKernel]]:
    """What may run `region`, by name: `chosen` is what does."""
    yield "whole", CapturedKernel(MeteredGraph(region, Tier.HOST))
    in_parts = chunked_kernel(region)
    assert isinstance(in_parts, ChunkedKernel)
    yield "in parts", in_parts
    if isinstance(chosen, FusedKernel):
        yield "fused", chosen


def measure(dtype: torch.dtype, size: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Seconds of each kernel, and how many times as fast as the whole ops it is."""
    rows, columns = size
    make_model = partial(nn.Linear, columns, rows, bias=False, dtype=dtype)
    make_batch = partial(torch.randn, 8, columns, dtype=dtype)
    step = placed_step(Case("", make_model, make_batch, low_precision=False))
    (chosen,) = host_kernels(step, "fused").values()
    region = step.module.get_submodule("region_0")
    assert isinstance(region, fx.GraphModule)
    given = [_like(node.meta["val"]) for node in region.graph.find_nodes(op="placeholder")]
    works = dict(kernels(region, chosen))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, kernel in works.items():
            began_s = time.perf_counter()
            kernel(given, Meter(UNLIMITED))
            if repeat:  # the first one warms up
                seconds[name].append(time.perf_counter() - began_s)
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": rows * columns,
        "seconds": median_s,
        "times_as_fast": {name: median_s["whole"] / s for name, s in median_s.items()},
    }


def _like(value: Tensor) -> Tensor:
    """Of values that are no denormals: those take longer."""
    return (torch.rand(value.shape) if value.dim() else torch.ones(())).to(value.dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both dtypes, print a line for each, and write the report."""
    question = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a small tensor, two rounds")
    given = parser.parse_args(arguments)
    size, repeats = (QUICK_SIZE, 2) if given.quick else (SIZE, REPEATS)
    before = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    try:
        records = [measure(dtype, size, repeats) for dtype in (torch.float32, torch.bfloat16)]
    finally:
        torch.set_num_threads(before)
    write_report(given.output, question, {"threads": given.threads, "records": records})
    for record in records:
        Console(soft_wrap=True).print(record)


if __name__ == "__main__":
    main()
