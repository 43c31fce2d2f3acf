"""Steps on this processor: is a calibration better than a guess, and by how much is it off?

    OMP_NUM_THREADS=1 python -m bench.runtime.processor_steps -o bench/results/processor_steps.json

The two lists of `processor_zoo`, with everything on the emulated device and no link. Predicted is
what the constants of a calibration say, its rates alone, and the guess that stands where nothing
was measured. There is a calibration before the steps and one behind them, and what is predicted is
the mean by both: a computer that others use is not the same all the time. Constants and steps are
both measured by the time of the one processor that the process has, which other programs' work does
not add to; of each step the least counts. By class of op, the predicted part of what its ops took
in the fastest of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cotrain_compile
from bench.report import write_report
from bench.results_page.tables import processor_steps
from bench.runtime.processor_zoo import FIRST, SECOND
from bench.runtime.simulated_vs_measured import Build
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.files import save
from cotrain_compile.machine import Machine, TierSpec
from cotrain_compile.machine.op_classes import VIEW, classes_of
from cotrain_compile.plan import Lane, Timeline
from cotrain_compile.presets import this_machine
from cotrain_compile.runtime.calibrate.calibrate import measured_tier, with_constants
from cotrain_compile.runtime.calibrate.link_bench import CpuBench, Sizes

SIZES = Sizes(matmul_side=1024, repeats=7)
WARM_UP, REPEATS = 3, 25
CALIBRATED = "calibration"


class ProcessorBench(CpuBench):
    """The emulated device by the processor's time."""

    def seconds(self, work: Callable[[], object]) -> float:
        return processor_s(work)


def processor_s(work: Callable[[], object]) -> float:
    """Of this process in `work`."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def machines() -> dict[str, Machine]:
    """By what a step is predicted by."""
    guess, device = this_machine(), torch.device("cpu")
    memory_bytes = guess.device.capacity_bytes
    bench = ProcessorBench(memory_bytes)
    rates = measured_tier(bench, device, memory_bytes, SIZES)
    tier, remarks = with_constants(bench, rates, device, SIZES)
    print(*remarks, sep="\n")
    known: dict[str, TierSpec] = {
        CALIBRATED: tier,
        "rates alone": replace(tier, factors={}, starts_s={}),
        "guess": guess.device,
    }
    return {name: guess.but(device=device) for name, device in known.items()}


def measured(build: Build, machine: Path) -> tuple[float, Dataflow, Timeline]:
    """Seconds of a step, the step, and when its ops ran in the fastest one."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    step, arguments = build()
    options: dict[str, Any] = {
        "machine": str(machine),
        "policy": "resident",
        "poison": False,
        "quiet": True,
    }
    run = torch.compile(step, backend="cotrain", options={**options, "lowering": "eager"})
    for _ in range(WARM_UP):
        run(*arguments)
    found: list[tuple[float, Timeline]] = []
    for _ in range(REPEATS):
        seconds = processor_s(lambda: run(*arguments))
        timeline = cotrain_compile.inspect(run).measured
        assert timeline is not None
        found.append((seconds, timeline))
    least_s, timeline = min(found, key=lambda each: each[0])
    return least_s, cotrain_compile.inspect(run).problem.dataflow, timeline


def class_of(op: Op) -> str:
    """The finest class of an op."""
    if not op.flops and not op.bytes_moved:
        return VIEW
    return classes_of(op.kind, op.target, op.dtype, computes=op.flops > 0)[0]


def predicted_s(dataflow: Dataflow, calibrations: Sequence[Machine]) -> dict[str, float]:
    """By op: the mean by several calibrations."""
    tables = [roofline(dataflow, machine).device_s for machine in calibrations]
    return {name: statistics.mean(table[name] for table in tables) for name in tables[0]}


def by_class(
    ran: Mapping[str, tuple[float, Dataflow, Timeline]], known: Mapping[str, Sequence[Machine]]
) -> list[dict[str, Any]]:
    """What the ops of each class took in all steps, and which part of it was predicted."""
    took: defaultdict[str, float] = defaultdict(float)
    told: defaultdict[str, float] = defaultdict(float)
    count = Counter[str]()
    for _, dataflow, timeline in ran.values():
        predicted = predicted_s(dataflow, known[CALIBRATED])
        for span in timeline.lane(Lane.DEVICE):
            name = class_of(dataflow.ops[dataflow.position[span.name]])
            took[name] += span.end_s - span.start_s
            told[name] += predicted[span.name]
            count[name] += 1
    return [
        {"class": name, "ops": count[name], "took_ms": 1e3 * s, "predicted": told[name] / s}
        for name, s in sorted(took.items(), key=lambda item: -item[1])
    ]


def rows_of(
    steps: Mapping[str, tuple[float, Dataflow, Timeline]], known: Mapping[str, Sequence[Machine]]
) -> list[dict[str, Any]]:
    """Of each step what it took, and predicted over measured by each way."""
    return [
        {
            "step": name,
            "list": "second" if name in SECOND else "first",
            "measured_ms": 1e3 * seconds,
            **{
                way: sum(predicted_s(dataflow, each).values()) / seconds
                for way, each in known.items()
            },
        }
        for name, (seconds, dataflow, _) in steps.items()
    ]


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    before = machines()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        save(before["guess"], path)
        ran = {}
        for name, build in {**FIRST, **SECOND}.items():
            ran[name] = measured(build, path)
            print(f"{name}: {1e3 * ran[name][0]:.1f} ms", flush=True)
    behind = machines()
    known = {way: (before[way], behind[way]) for way in before}
    rows = rows_of(ran, known)
    off = {
        f"{which} list": {
            way: statistics.median(abs(row[way] - 1) for row in rows if row["list"] == which)
            for way in known
        }
        for which in ("first", "second")
    }
    result = {"steps": rows, "off, median": off, "classes": by_class(ran, known)}
    print(processor_steps(result))
    if output:
        write_report(output, "Is a calibration better than a guess on its own steps?", result)


if __name__ == "__main__":
    main()
