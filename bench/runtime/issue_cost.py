"""What does a step on a card cost beyond its kernels? Microseconds of Python a task and a step.

A GPT of 6 layers is placed as for a card and run by the CUDA runtime on a card that computes
nothing: its streams and events are numbers, each call to CUDA takes as long as `PRICES_S` says (the
driver's calls, as published measurements have them), compiled segments return empty memory and host
kernels and casts return at once. What a step then takes, less these calls, is Python, on the step's
own thread and on the threads of the lanes, which share one interpreter with it. What it takes to
start small tasks, by themselves and in bundles, is measured on the emulated device (`starts`).

    python -m bench.runtime.issue_cost -o bench/results/issue_cost.json

`--before FILE` puts the result of an earlier run beside this one. `--profile PLAN` shows where the
step's thread spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

from bench.gpu.model import Size, Training
from bench.report import write_report
from bench.runtime import starts
from cotrain_compile.backends.inductor.lower import LoweredStep, segments_of
from cotrain_compile.backends.inductor.segments import SegmentedStep
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.job import Shape
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.course import Course
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.ops import TASKS, Launch

SIZE = Size(Shape(characters=128, context=256, width=384, layers=6, heads=6), rows=8)
MACHINE = "h100"
POLICIES = ("resident", "streamed", "zero-offload", "coarse")
# The least of many single steps: other programs on the machine lengthen most of them.
ROUNDS = 60
STUB_CALLS = 20
COLUMNS = (
    *("tasks", "segments", "kinds", "card_calls"),
    *(
        "us_per_task",
        "python_us_per_task",
        "us_per_segment",
        "us_fixed",
        "us_per_step",
        "planned_us",
    ),
)
# Seconds on the calling thread, from measurements that have been published: an event recorded, a
# stream made to wait for one, a copy given to a stream through `Tensor.copy_`.
PRICES_S = {"record": 1.2e-6, "hold": 0.7e-6, "copy": 5.0e-6}


class NullEvent:
    """Has come."""

    at_s = 0.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It has come."""


class NullCard:
    """A card whose work takes no time and whose calls take what they are priced at."""

    device = torch.device("cpu")
    cache_bytes = 0

    def __init__(self, prices_s: dict[str, float]) -> None:
        self._prices_s = prices_s
        self.calls = dict.fromkeys(prices_s, 0)

    def start_step(self) -> None:
        """Nothing to note."""

    def stream(self) -> object:
        return object()

    def record(self, stream: object, *, timed: bool = False) -> NullEvent:
        self._pay("record")
        return NullEvent()

    def hold(self, stream: object, event: object) -> None:
        self._pay("hold")

    def copy(self, stream: object, destination: Tensor, source: Tensor) -> None:
        self._pay("copy")

    def copy_all(
        self, stream: object, destinations: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        for _ in destinations:
            self._pay("copy")

    def _pay(self, call: str) -> None:
        until_s = time.perf_counter() + self._prices_s[call]
        self.calls[call] += 1
        while time.perf_counter() < until_s:
            pass

    def seconds_between(self, start: object, end: object) -> float:
        return 0.0

    def synchronize(self) -> None:
        """Nothing is under way."""

    def pin(self, row: Tensor) -> None:
        """Nothing to pin for."""

    def unpin(self, row: Tensor) -> None:
        """Nothing was pinned."""

    def bind_thread(self) -> None:
        """There is one device."""

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reserved_peak_bytes(self) -> int:
        return 0


class NullDevice(CudaDevice):
    """Starts casts on the host as it would, which then do nothing."""

    def _start_work(
        self,
        work: Callable[[], object],
        launch: Launch,
        course: Course,
        fresh: Tensor | None = None,
    ) -> None:
        super()._start_work(work if fresh is None else _no_work, launch, course, fresh)


@dataclass
class Job:
    """A placed step on the null card and its tensors; `stub_s` is what its segments take."""

    device: CudaDevice
    card: NullCard
    values: list[Any]
    plan: Plan
    segments: int
    kinds: int
    step: Any = None
    stub_s: float = 0.0

    @property
    def tasks(self) -> int:
        return len(self.plan.tasks)

    def run(self) -> None:
        self.step(list(self.values))


def new_job(policy: str, prices_s: dict[str, float]) -> Job:
    """The GPT under `policy`, cut into segments that do nothing."""
    step, values = _captured()
    dataflow, machine = extract(step), find(MACHINE)
    problem = formulate(dataflow, machine, Options().budgets(machine))
    plan = schedule(problem, rule(policy)(dataflow), compiled=True)
    placed = run_passes(step, plan)
    cut = segments_of(step, placed, dataflow)
    card, values = NullCard(prices_s), [_copied(value) for value in values]
    kernels = dict.fromkeys(host_kernels(placed, "captured"), _no_work)
    pool = PinnedPool(card.pin, card.unpin, lambda: 1 << 40)
    device = NullDevice(card, pool, 1 << 40, kernels)
    job = Job(device, card, values, plan, len(cut.segments), _kinds(cut))
    code = {str(call.target): _stub(call, job) for call in _calls(cut)}
    job.step = CompiledStep(problem, plan, placed, device, LoweredStep(cut, code))
    return job


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _kinds(cut: SegmentedStep) -> int:
    return len({segment.key for segment in cut.segments.values()})


def _calls(cut: SegmentedStep) -> list[fx.Node]:
    return list(cut.step.module.graph.find_nodes(op="call_module"))


@cache
def _captured() -> tuple[StepGraph, list[Any]]:
    return Training(SIZE, "cpu").captured()


def _no_work(*_: Any) -> None:
    """A host kernel."""


def _stub(call: fx.Node, job: Job) -> Callable[[list[Any]], list[Tensor]]:
    """Code that makes the results of a segment without computing them."""
    items = {user.args[1]: user.meta["val"] for user in call.users}
    made = [(tuple(v.shape), v.stride(), v.dtype) for _, v in sorted(items.items())]

    def code(arguments: list[Any]) -> list[Tensor]:
        arguments.clear()
        return [torch.empty_strided(sizes, strides, dtype=dtype) for sizes, strides, dtype in made]

    took_s = []
    for _ in range(STUB_CALLS):
        began_s = time.thread_time()
        code([])
        took_s.append(time.thread_time() - began_s)
    job.stub_s += min(took_s)
    return code


# Measuring.


def measured(policy: str, prices_s: dict[str, float]) -> dict[str, float]:
    """Of one plan: counts, and microseconds of Python by what they were spent on."""
    job = new_job(policy, prices_s)
    for _ in range(3):
        job.run()
    card_calls = dict(job.card.calls)
    job.run()
    card_calls = {name: n - card_calls[name] for name, n in job.card.calls.items()}
    best = _least(job)
    in_tasks_s = best["task_nodes_s"] + best["lane_threads_s"]
    calls_s = sum(prices_s[name] * n for name, n in card_calls.items())
    return {
        "parameters": len(job.plan.placement.updates),
        "tasks": job.tasks,
        "segments": job.segments,
        "kinds": job.kinds,
        "card_calls": sum(card_calls.values()),
        "card_calls_us": 1e6 * calls_s,
        "us_per_task": 1e6 * in_tasks_s / job.tasks if job.tasks else 0.0,
        "python_us_per_task": 1e6 * (in_tasks_s - calls_s) / job.tasks if job.tasks else 0.0,
        "us_per_segment": 1e6 * best["segment_nodes_s"] / job.segments,
        "us_fixed": 1e6 * best["fixed_s"],
        "us_per_step": 1e6 * best["step_s"],
        "planned_us": 1e6 * job.plan.predicted.makespan_s,
    }


def _least(job: Job) -> dict[str, float]:
    """Seconds a step: of whole steps, then of steps taken apart, each the least of all rounds."""
    whole_s, lanes_s = min(_processor_s(job) for _ in range(ROUNDS))
    apart = [_taken_apart(job) for _ in range(ROUNDS)]
    spent = {sort: min(found[sort] for _, found in apart) for sort in apart[0][1]}
    return {
        "step_s": whole_s,
        "lane_threads_s": lanes_s,
        "task_nodes_s": spent["task"],
        "segment_nodes_s": spent["segment"],
        "fixed_s": min(own_s - sum(found.values()) for own_s, found in apart),
    }


def _processor_s(job: Job) -> tuple[float, float]:
    """Of one step: of all threads, and of those that are not the step's."""
    began_s, own_began_s = time.process_time(), time.thread_time()
    job.run()
    own_s = time.thread_time() - own_began_s
    whole_s = time.process_time() - began_s
    return whole_s - job.stub_s, whole_s - own_s


def _taken_apart(job: Job) -> tuple[float, dict[str, float]]:
    """Seconds of the step's thread, and in the nodes of each sort."""
    spent = {"task": 0.0, "segment": 0.0, "other": 0.0}
    program = job.step._program
    run_call, clock = program.run_call, time.thread_time
    own_s = _empty_s(clock)

    def timed(call: Any) -> Any:
        began_s = clock()
        value = run_call(call)
        sort = "segment" if call.node.op == "call_module" else "other"
        spent["task" if call.node.target in TASKS else sort] += clock() - began_s - own_s
        return value

    with mock.patch.object(program, "run_call", timed):
        began_s = clock()
        job.run()
        whole_s = clock() - began_s
    spent["segment"] -= job.stub_s
    return whole_s - job.stub_s - 3 * len(program._calls) * own_s, spent


def _empty_s(clock: Callable[[], float]) -> float:
    """What asking the clock takes."""
    began_s = clock()
    for _ in range(1000):
        clock()
    return (clock() - began_s) / 1000


def _table(found: dict[str, Any], before: dict[str, Any]) -> Table:
    table = Table("plan", *COLUMNS)
    for policy, row in found.items():
        old = before.get(policy, {})
        cells = [
            f"{old[c]:,.0f} > {row[c]:,.0f}" if c in old else f"{row[c]:,.0f}" for c in COLUMNS
        ]
        table.add_row(policy, *cells)
    return table


def main() -> None:
    """Measure, print a table, write a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--profile", choices=POLICIES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    if arguments.profile:
        _profile(new_job(arguments.profile, PRICES_S))
        return
    found = {policy: measured(policy, PRICES_S) for policy in POLICIES}
    before = json.loads(arguments.before.read_text())["result"]["after"] if arguments.before else {}
    console.print(_table(found, before))
    small = starts.measured()
    for name, row in small.items():
        console.print(name, row)
    if arguments.o:
        result = {"prices_s": PRICES_S, "before": before, "after": found, "starts": small}
        write_report(arguments.o, __doc__.splitlines()[0], result)


def _profile(job: Job) -> None:
    for _ in range(3):
        job.run()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(10):
        job.run()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
