"""How fast does the host update? Our host kernels against ATen's fused AdamW and a plain copy.

One tensor of 32M parameters and the parameters of one Llama layer, with gradients in float32 and in
bfloat16; those of the layer are clipped, too, before they are used. ATen does the same work op by
op, and the update alone with gradients that are ready. What is compared runs in turn, on the thread
of a host lane. Beside it a thread spins in Python and notes the longest time it stood still: what
the device's thread would lose to an update. Time in which it could have run but the system gave its
core to somebody else does not count; "nothing" (a lane asleep) shows what is left without updates.

    python -m bench.runtime.host_update -o bench/results/host_update.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.report import write_report
from cotrain_compile import presets
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import zero_offload
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.runtime.host.fused_kernel import FusedKernel, HostKernel
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.lanes import WorkerLane
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.task_nodes import RegionCall, region_calls

Work = Callable[[], None]

REPEATS, QUICK_REPEATS = 15, 2
# At least this part of ATen's speed, and never a longer gap.
RATIO, GAP_S = 0.9, 10e-3
UNLIMITED = dict.fromkeys(MEMORIES, 1 << 62)


# The steps whose updates are measured. They are traced, not run.


@dataclass(frozen=True)
class Case:
    """A model whose parameters below `prefix` are updated."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Tensor]
    low_precision: bool
    clipped: bool = False
    prefix: str = ""
    fused: bool = False  # as the user's optimizer is made


def cases(quick: bool) -> Iterator[Case]:
    """Each model with both kinds of gradients."""
    rows, columns, width = (64, 32, 64) if quick else (8192, 4096, 2048)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    for low_precision in (False, True):
        dtype = "bfloat16" if low_precision else "float32"
        yield Case(
            f"one tensor, {dtype} gradient",
            lambda: nn.Linear(columns, rows, bias=False),
            lambda: torch.randn(8, columns),
            low_precision,
        )
        yield Case(
            f"Llama layer, {dtype} gradients, clipped",
            lambda: LlamaForCausalLM(config),
            lambda: torch.randint(0, 128, (1, 8)),
            low_precision,
            clipped=True,
            prefix="model.layers",
        )


def traced_step(case: Case) -> StepGraph:
    """The step of `case`."""

    def build() -> tuple[Callable[[Tensor], None], tuple[Tensor]]:
        model = case.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.fused)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=case.low_precision):
                out = model(x)
            getattr(out, "logits", out).float().pow(2).mean().backward()
            if case.clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step, (case.make_batch(),)

    return trace_graph(build)


def placed_step(case: Case) -> StepGraph:
    """The same with every update on the host."""
    graph = traced_step(case)
    dataflow = extract(graph)
    problem = formulate(dataflow, presets.find("h100"), UNLIMITED)
    return run_passes(graph, schedule(problem, zero_offload(dataflow)))


# What is compared.


@dataclass(frozen=True)
class Update:
    """A host region with tensors of its own to run on, and the same update done by ATen.

    `gradient` is as it leaves the backward, `ready` as the update takes it.
    """

    kernel: HostKernel
    inputs: tuple[Any, ...]
    param: Tensor
    states: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    clip: Tensor | None
    ready: Tensor

    def ours(self) -> None:
        self.kernel(self.inputs, MemoryMeter(UNLIMITED))

    def op_by_op(self) -> None:
        gradient = self.gradient.float()
        self._update(gradient if self.clip is None else gradient * self.clip)

    def update_alone(self) -> None:
        self._update(self.ready)

    def _update(self, gradient: Tensor) -> None:
        step, exp_avg, exp_avg_sq = self.states
        step.add_(1)
        torch._fused_adamw_(
            [self.param],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def updates(case: Case) -> list[Update]:
    """The updates of the parameters of `case`, each by itself, also those that are in a bundle."""
    step = placed_step(case)
    calls = [call for _, call in region_calls(step.module.graph)]
    kernels = host_kernels(step, "fused")
    own = [kernels[call.launch.task] for call in calls]
    assert all(isinstance(kernel, FusedKernel) for kernel in own)
    found = [_update(step, call, kernel, case) for call, kernel in zip(calls, own, strict=True)]
    return [update for param, update in found if param.startswith(case.prefix)]


def _update(
    step: StepGraph, call: RegionCall, kernel: HostKernel, case: Case
) -> tuple[str, Update]:
    region = call.subgraph(step.module)
    nodes = region.graph.find_nodes(op="placeholder")
    inputs = {node.name: _like(node.meta["val"]) for node in nodes}
    described = step.input_of_node
    named = {described[node].name: t for node, t in inputs.items() if node in described}
    (param,) = (name for name in named if f"{name}.step" in named)
    own = named[param]
    computed = [value for node, value in inputs.items() if node not in described]
    (gradient,) = (value for value in computed if value.numel() == own.numel())
    return param, Update(
        kernel,
        tuple(inputs.values()),
        own,
        (named[f"{param}.step"], named[f"{param}.exp_avg"], named[f"{param}.exp_avg_sq"]),
        gradient,
        torch.ones(()) if case.clipped else None,
        torch.full_like(own, 1e-3),
    )


def _like(value: Any) -> Any:
    """A tensor like that of a trace, all of it written to; a number where it is a setting."""
    if not isinstance(value, Tensor):
        return 1e-4
    made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
    return made.fill_(1e-3 if value.dim() else 1.0)


# Measuring.


def seconds_in_turn(
    works: dict[str, Work], lane: WorkerLane, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each work on the lane, round by round, after one round that warms up."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + 1):
        for name, work in works.items():
            task = lane.submit(name, work, ())
            task.done.wait()
            assert task.ran, task.error
            if number:
                found[name].append(task.end_s - task.start_s)
    return found


def gaps_in_turn(works: dict[str, Work], lane: WorkerLane, repeats: int) -> dict[str, list[float]]:
    """The longest time that a spinning thread stood still in each run of each work."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            with spinning() as longest_s:
                lane.submit(name, work, ()).done.wait()
            found[name] += longest_s
    return found


@contextmanager
def spinning() -> Iterator[list[float]]:
    """Spin on a thread of its own while the body runs; gives its longest gap, in seconds."""
    longest_s, stop = [0.0], threading.Event()

    def spin() -> None:
        # The second figure is the time in line for a core, in ns (Linux: sched-stats.rst).
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as statistics_of_thread:

            def own_s() -> float:
                waited_ns = int(os.pread(statistics_of_thread.fileno(), 64, 0).split()[1])
                return time.perf_counter() - 1e-9 * waited_ns

            last_s = own_s()
            while not stop.is_set():
                now_s = own_s()
                longest_s[0] = max(longest_s[0], now_s - last_s)
                last_s = now_s

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield longest_s
    finally:
        stop.set()
        thread.join()


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Seconds, rates, our speed as a multiple of ATen's, and gaps."""
    own, lane = updates(case), WorkerLane("host")
    count = sum(update.param.numel() for update in own)
    source, copied = (torch.ones(count) for _ in range(2))
    works: dict[str, Work] = {
        "copy": partial(_all, [lambda: copied.copy_(source)]),
        "update alone": partial(_all, [update.update_alone for update in own]),
        "op by op": partial(_all, [update.op_by_op for update in own]),
        "ours": partial(_all, [update.ours for update in own]),
    }
    seconds = seconds_in_turn(works, lane, repeats)
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    asleep: dict[str, Work] = {"nothing": partial(time.sleep, median_s["ours"])}
    gaps = gaps_in_turn({**asleep, **works}, lane, repeats)
    return {
        "case": case.name,
        "parameters": count,
        "seconds": {name: _spread(values) for name, values in seconds.items()},
        "copy_bytes_per_s": 8 * count / median_s["copy"],
        "update_alone_bytes_per_s": presets.ADAMW_BYTES_PER_PARAMETER
        * count
        / median_s["update alone"],
        "ours_parameters_per_s": count / median_s["ours"],
        "of_update_alone": _ratio(seconds["update alone"], seconds["ours"]),
        "of_op_by_op": _ratio(seconds["op by op"], seconds["ours"]),
        "gap_s": {name: _spread(values) for name, values in gaps.items()},
    }


def _all(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()


def _ratio(others_s: Sequence[float], ours_s: Sequence[float]) -> dict[str, float]:
    """Our speed as a multiple of another's, round by round."""
    return _spread([other / own for other, own in zip(others_s, ours_s, strict=True)])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst case of each figure, and whether it reaches its target."""
    ratio = min(record["of_op_by_op"]["median"] for record in records)
    gap_s = max(record["gap_s"]["ours"]["max"] for record in records)
    return {
        "of_op_by_op_worst": ratio,
        "of_update_alone_worst": min(record["of_update_alone"]["median"] for record in records),
        "ratio_met": ratio >= RATIO,
        "gap_worst_s": gap_s,
        "gap_with_nothing_worst_s": max(record["gap_s"]["nothing"]["max"] for record in records),
        "gap_met": gap_s <= GAP_S,
    }


def line(record: dict[str, Any]) -> str:
    """One case as text."""
    gaps_ms = {name: 1e3 * gap["max"] for name, gap in record["gap_s"].items()}
    return (
        f"{record['case']:42}{record['seconds']['ours']['median'] * 1e3:8.1f} ms"
        f"{record['of_op_by_op']['median']:6.2f} of op by op"
        f"{record['of_update_alone']['median']:6.2f} of the update alone"
        f"   longest gap {gaps_ms['ours']:.1f} ms, with nothing {gaps_ms['nothing']:.1f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, print a line for each, and write the report."""
    question = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="tiny tensors, two rounds")
    given = parser.parse_args(arguments)
    console, records = Console(soft_wrap=True), []
    before = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    try:
        for case in cases(given.quick):
            records.append(measure(case, QUICK_REPEATS if given.quick else REPEATS))
            console.print(line(records[-1]))
    finally:
        torch.set_num_threads(before)
    result = {"threads": given.threads, "summary": summary(records), "records": records}
    write_report(given.output, question, result)
    console.print(result["summary"])


if __name__ == "__main__":
    main()
