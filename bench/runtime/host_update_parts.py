"""What do parts that stay in the cache save an update without a fused loop?

AdamW on one tensor, in float32 and in bfloat16: the captured ops whole, the same ops in parts, and
ATen's fused loop. They run in turn, round by round, in one process. In bfloat16 the loop is for an
optimizer with `fused=True`, as this one: it rounds once where the ops round each time. Beside what
they take stands what the planner predicts, with the rates that `calibrate` measures, here on the
same threads. On one thread seconds are processor time, so that other work on the computer does not
count. The C library keeps memory of results up to 32 MiB, as in a process that has trained for a
while.

    python -m bench.runtime.host_update_parts -o host_update_parts.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, fx, nn

from bench.report import write_report
from bench.runtime.host_update import REPEATS, UNLIMITED, Case, placed_step, traced_step
from cotrain_compile import presets
from cotrain_compile.analysis.costs import host_update_s
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.extract.extract import extract
from cotrain_compile.machine import HostUpdate, Machine, Tier
from cotrain_compile.runtime.calibrate.calibrate import adamw_update
from cotrain_compile.runtime.calibrate.link_bench import Sizes, least_s
from cotrain_compile.runtime.calibrate.op_rates import (
    elements_per_s,
    free_a_large_result,
    fresh_bytes_per_s,
)
from cotrain_compile.runtime.host.captured_kernels import (
    CapturedKernel,
    ChunkedKernel,
    chunked_kernel,
)
from cotrain_compile.runtime.host.fused_kernel import FusedKernel, HostKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.meter import MemoryMeter, MeteredGraph

SIZE, QUICK_SIZE = (2048, 4096), (512, 1024)


def kernels(region: fx.GraphModule, chosen: HostKernel) -> Iterator[tuple[str, HostKernel]]:
    """What may run `region`, by name: `chosen` is what does."""
    yield "whole", CapturedKernel(MeteredGraph(region, Tier.HOST))
    in_parts = chunked_kernel(region)
    assert isinstance(in_parts, ChunkedKernel)
    yield "in parts", in_parts
    if isinstance(chosen, FusedKernel):
        yield "fused", chosen


def measured_machine(quick: bool) -> Machine:
    """This computer's rates of updates on as many threads as torch has."""
    sizes = Sizes(updated_parameters=2**18, repeats=2) if quick else Sizes()
    update = adamw_update(sizes.updated_parameters)
    moved = sizes.updated_parameters * presets.ADAMW_BYTES_PER_PARAMETER
    rates = HostUpdate(
        moved / least_s(partial(seconds_of, update), sizes.repeats),
        elements_per_s=elements_per_s(sizes.repeats, seconds_of),
        fresh_bytes_per_s=fresh_bytes_per_s(sizes.repeats, seconds_of),
    )
    return presets.find(presets.THIS_MACHINE).but(host_update=rates)


def seconds_of(work: Callable[[], object]) -> float:
    """Of the processor on one thread, else by the clock on the wall."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began_s = clock()
    work()
    return clock() - began_s


def predicted_s(dataflow: Dataflow, machine: Machine) -> dict[str, float]:
    """What the planner takes the update for, by what runs it."""
    (group,) = dataflow.updates
    own, loop = replace(group, has_loop=False), replace(group, has_loop=True)
    return {
        "whole": host_update_s(dataflow, own, machine, captured=True),
        "in parts": host_update_s(dataflow, own, machine),
        "fused": host_update_s(dataflow, loop, machine),
    }


def measure(
    dtype: torch.dtype, size: tuple[int, int], repeats: int, machine: Machine
) -> dict[str, Any]:
    """Seconds of each kernel, how many times as fast as the whole ops it is, and predicted ones."""
    rows, columns = size
    make_model = partial(nn.Linear, columns, rows, bias=False, dtype=dtype)
    make_batch = partial(torch.randn, 8, columns, dtype=dtype)
    case = Case("", make_model, make_batch, low_precision=False, fused=True)
    step = placed_step(case)
    predicted = predicted_s(extract(traced_step(case)), machine)
    (chosen,) = host_kernels(step, "fused").values()
    region = step.module.get_submodule("region_0")
    assert isinstance(region, fx.GraphModule)
    given = [_like(node.meta["val"]) for node in region.graph.find_nodes(op="placeholder")]
    works = dict(kernels(region, chosen))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, kernel in works.items():
            taken_s = seconds_of(partial(kernel, given, MemoryMeter(UNLIMITED)))
            if repeat:  # the first one warms up
                seconds[name].append(taken_s)
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": rows * columns,
        "seconds": median_s,
        "times_as_fast": {name: median_s["whole"] / s for name, s in median_s.items()},
        "predicted": {name: predicted[name] / s for name, s in median_s.items()},
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
        free_a_large_result()
        machine = measured_machine(given.quick)
        dtypes = (torch.float32, torch.bfloat16)
        records = [measure(dtype, size, repeats, machine) for dtype in dtypes]
    finally:
        torch.set_num_threads(before)
    rates = asdict(machine.host_update)
    result = {"threads": given.threads, "rates": rates, "records": records}
    write_report(given.output, question, result)
    for record in records:
        Console(soft_wrap=True).print(record)


if __name__ == "__main__":
    main()
