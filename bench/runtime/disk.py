"""How fast is a step that rests on the drive at hand, against raw direct reads and writes?

A chain of square layers with AdamW, whose weights rest on disk with all their states, so that its
updates are bound by the drive. In turn: a step; the same bytes read and written with nothing in
between, by as many threads in pieces of the same size; and what one would write by hand, parameter
by parameter: read it and its states, update, write them; and, where DeepSpeed is installed and can
build its `async_io`, its swapper. Of each the median counts. Then parameters and states are
compared with a training in memory, and the cgroup says what memory was taken. A drive that others
use does not keep its rates: they are measured between the steps, too, and what a plan predicts of
each is compared with the step before.

    python -m bench.runtime.disk --folder /nvme -o bench/results/disk.json
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import cotrain_compile
from bench.report import write_report
from bench.runtime.deepspeed_swap import SETTINGS, Swapper, async_io
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Lane, Plan, Timeline
from cotrain_compile.plan.on_disk import PIECE_BYTES, update_room_bytes
from cotrain_compile.runtime.calibrate.disk_bench import measured_disk
from cotrain_compile.runtime.disk.rooms import Rooms
from cotrain_compile.runtime.disk.state_files import StateFile, file_of
from cotrain_compile.support.units import format_bytes

WIDTH, LAYERS = 4096, 4
ROUNDS, STEPS = 8, 20
# The host holds gradients, what an update may make, and the rooms.
HELD_BESIDE = 353 << 20
IN_MEMORY: dict[str, Any] = {
    "policy": "zero-offload",
    "memory_budget": "4GiB",
    "plan_cache": False,
    "poison": False,
    "quiet": True,
}


class Training:
    """A chain of layers, AdamW and a step; `options` as of the backend."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        torch._dynamo.reset()
        self.step = torch.compile(self._step, backend="cotrain", options={**IN_MEMORY, **options})

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    def train(self, number: int) -> None:
        """Step `number`, on a batch of its own."""
        batch = torch.Generator().manual_seed(number)
        self.step(torch.randn(1, WIDTH, generator=batch))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that training changes."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self.model.parameters(), *states]

    @property
    def files(self) -> list[list[StateFile]]:
        """Where each parameter rests that does, with its states."""
        owned = [[p, *self.optimizer.state[p].values()] for p in self.model.parameters()]
        found = ([file for t in each if (file := file_of(t)) is not None] for each in owned)
        return [each for each in found if each]


def raw_s(files: Sequence[Sequence[StateFile]], rooms: Rooms) -> float:
    """Read and write every byte of `files` once, by way of `rooms`, with nothing in between."""
    began_s = time.perf_counter()
    passing = [rooms.ask(each, each[0].nbytes) for each in files]
    for each in passing:
        for number in range(each.count):
            each.take(number)
            each.give_back(number)
    for each in passing:
        each.finish()
    return time.perf_counter() - began_s


def by_hand_s(files: Sequence[Sequence[StateFile]]) -> float:
    """The same, parameter by parameter: it and both states are read, updated and written."""
    nbytes = files[0][0].nbytes
    memory = [mmap.mmap(-1, nbytes) for _ in range(3)]
    weight, first, second = (torch.frombuffer(each, dtype=torch.float32) for each in memory)
    gradient, count = torch.zeros_like(first), torch.ones(())
    began_s = time.perf_counter()
    with ThreadPoolExecutor(3) as threads:
        for own in files:
            moved = list(zip(own, memory, strict=True))
            list(threads.map(lambda each: each[0].read(memoryview(each[1]), 0), moved))
            torch._fused_adamw_(
                [weight], [gradient], [first], [second], [], [count],
                lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip
            list(threads.map(lambda each: each[0].write(memoryview(each[1]), 0), moved))
    return time.perf_counter() - began_s


def updating_s(timeline: Timeline) -> float:
    """From the first update on the host to the last write; of both some pieces are read before."""
    spans = [span for span in timeline.spans if "update." in span.name]
    began_s = min(span.start_s for span in spans if span.lane is Lane.HOST)
    return max(span.end_s for span in spans) - began_s


def predicted_s(problem: Problem, plan: Plan, folder: Path) -> float:
    """Of the updates, by the rates that the drive has now."""
    machine = problem.machine.with_disk(measured_disk(folder))
    return updating_s(schedule(replace(problem, machine=machine), plan.placement).predicted)


class Resident:
    """The most memory that the cgroup counts while within, page cache included.

    Nothing else is to run in it meanwhile.
    """

    def __enter__(self) -> Resident:
        self.most = counted_bytes()
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self.most = max(self.most, counted_bytes())


def counted_bytes() -> int:
    """What the cgroup of this process counts, of version 2 or 1; of all that runs in it."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, kinds, path in groups:
        own = "memory/" if kinds == "memory" else ""
        name = "memory.usage_in_bytes" if own else "memory.current"
        file = Path(f"/sys/fs/cgroup/{own}{path.lstrip('/')}") / name
        if file.is_file():
            return int(file.read_text())
    raise OSError("no cgroup counts the memory of this process")


@dataclass
class Seconds:
    """What each round took: the step, its updates, and the same bytes by other means."""

    step: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)
    swappers: dict[str, list[float]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """The medians, and each round."""
        pairs = list(zip(self.raw, self.updates, self.predicted, strict=True))
        return {
            "step_s": statistics.median(self.step),
            "updates_s": statistics.median(self.updates),
            "raw_s": statistics.median(self.raw),
            "by_hand_s": statistics.median(self.by_hand),
            "deepspeed_s": {name: statistics.median(s) for name, s in self.swappers.items()},
            "of_raw_rate": statistics.median(raw / own for raw, own, _ in pairs),
            "predicted_updates_s": statistics.median(self.predicted),
            "predicted_over_measured": statistics.median(told / own for _, own, told in pairs),
            "rounds": [
                {"step_s": step, "updates_s": own, "raw_s": raw, "predicted_updates_s": told}
                for step, (raw, own, told) in zip(self.step, pairs, strict=True)
            ],
        }


def rounds_of(training: Training, folder: Path, rounds: int, say: Callable[[str], None]) -> Seconds:
    """So many steps, each beside the other ways to move the same bytes."""
    compiled = cotrain_compile.inspect(training.step)
    plan, dataflow = compiled.plan, compiled.problem.dataflow
    scratch = [[StateFile(folder, file.nbytes) for file in each] for each in training.files]
    rooms = Rooms(update_room_bytes(dataflow, plan.placement))
    raw_s(scratch, rooms)  # what was never written is not read from the drive
    module = async_io()
    found = Seconds(swappers={name: [] for name in SETTINGS if module is not None})
    for number in range(1, rounds + 1):
        began_s = time.perf_counter()
        training.train(number)
        found.step.append(time.perf_counter() - began_s)
        assert compiled.measured is not None
        found.updates.append(updating_s(compiled.measured))
        found.raw.append(raw_s(scratch, rooms))
        found.predicted.append(predicted_s(compiled.problem, plan, folder))
        if number % 2:
            found.by_hand.append(by_hand_s(scratch))
        for name, each_s in found.swappers.items():
            with Swapper(module, folder, len(scratch), WIDTH * WIDTH, SETTINGS[name]) as swapper:
                each_s.append(swapper.update_s())
        say(
            f"step {found.step[-1]:.2f} s, updates {found.updates[-1]:.2f} s, "
            f"raw {found.raw[-1]:.2f} s"
        )
    return found


def measured_disk_steps(folder: Path, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All figures of one training on disk, and its comparison with one in memory."""
    before = counted_bytes()
    training = Training(
        disk=str(folder), host_memory_budget=4 * WIDTH * WIDTH * LAYERS + HELD_BESIDE
    )
    training.train(0)
    with Resident() as resident:
        compiled, own = cotrain_compile.inspect(training.step), training.files
        figures = rounds_of(training, folder, rounds, say).figures()
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        for number in range(rounds + 1, STEPS):
            training.train(number)
    torch._dynamo.reset()
    pairs = zip(training.tensors, in_memory(max(STEPS, rounds + 1)), strict=True)
    assert compiled.measured is not None
    plan, peaks = compiled.plan, compiled.measured.peak_bytes
    return figures | {
        "bytes_moved_a_step": 2 * sum(file.nbytes for each in own for file in each),
        "parameters_on_disk": len(own),
        "piece_bytes": PIECE_BYTES,
        "predicted_at_first_s": updating_s(plan.predicted),
        "equal_after_steps": max(STEPS, rounds + 1),
        "are_equal": all(torch.equal(a, b) for a, b in pairs),
        "host_budget_bytes": plan.budgets[Tier.HOST],
        "host_peak_bytes": peaks[Tier.HOST],
        "disk_peak_bytes": peaks[Tier.DISK],
        "device_peak_bytes": peaks[Tier.DEVICE],
        "cgroup_bytes_more": resident.most - before,
        "load_a_core": load,
    }


def in_memory(steps: int) -> Sequence[torch.Tensor]:
    """What the same training leaves with everything in memory."""
    reference = Training()
    for number in range(steps):
        reference.train(number)
    return reference.tensors


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    rate = result["bytes_moved_a_step"] / result["updates_s"]
    host = format_bytes(result["host_budget_bytes"])
    rows = [
        ("weights and states on disk", format_bytes(result["disk_peak_bytes"])),
        ("read and written in a step", format_bytes(result["bytes_moved_a_step"])),
        ("updates of a step, with both", f"{result['updates_s']:.2f} s"),
        ("the same bytes with nothing in between", f"{result['raw_s']:.2f} s"),
        ("rate of the updates", f"{rate / 1e9:.2f} GB/s, {result['of_raw_rate']:.2f} of that"),
        ("by hand, one parameter after the other", f"{result['by_hand_s']:.2f} s"),
        *(
            (f"DeepSpeed's swapper, {name}", f"{seconds:.2f} s")
            for name, seconds in result["deepspeed_s"].items()
        ),
        ("updates predicted", f"{result['predicted_updates_s']:.2f} s"),
        ("the host at its peak", f"{format_bytes(result['host_peak_bytes'])} of {host}"),
        ("the emulated device", format_bytes(result["device_peak_bytes"])),
        ("both, by the cgroup's own count", format_bytes(result["cgroup_bytes_more"])),
        (f"equal in memory after {result['equal_after_steps']} steps", str(result["are_equal"])),
        ("load of the computer's cores meanwhile", f"{result['load_a_core']:.0f} of each"),
    ]
    lines = ["| a step bound by the drive | median |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)]) + "\n"


def main() -> None:
    """The command of the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    console = Console()
    result = measured_disk_steps(given.folder, given.rounds, console.print)
    write_report(given.output, __doc__.splitlines()[0], result)
    console.print({name: value for name, value in result.items() if name != "rounds"})


if __name__ == "__main__":
    main()
