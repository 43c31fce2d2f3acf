"""Do steps that make values again take what their plans say? Predicted and measured, emulated.

For three small models whose memory is in their activations, on a throttled link of 0.01 GB/s:
`auto` with as much device memory as one level of values made again needs, with a profile of the
resident step. Told are the predicted and the measured time and device peak of the step, and whether
its losses are those of the resident plan in every bit. Profile and steps are measured in the same
rounds, as by `simulated_vs_measured`, and of each the fastest fifth counts; on a machine that
others use the times are noise.

    python -m bench.runtime.recompute_measured -o bench/results/recompute_measured.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from bench.report import write_report
from bench.results_page.tables import Result, markdown
from bench.runtime.simulated_vs_measured import (
    LATENCY_S,
    PROFILE_REPEATS,
    PROFILED,
    Build,
    compile_step,
    profile,
    record,
    run_in_turn,
)
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.job import CharacterGPT
from cotrain_compile.demo.job import Shape as Demo
from cotrain_compile.files import save
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.variants import Levels
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.support.units import format_bytes, format_seconds

# So slow that what is made again is sooner there than what comes back over the link.
SLOW_BYTES_PER_S = 1e7
LEVEL, REPEATS, STEPS, LIMIT_S = 2, 10, 3, 2.0
# Of the machine only the links count, which are set here: every op and update has a measured time.
SIZES = Sizes(copy_bytes=1 << 24, matmul_side=512, updated_parameters=1 << 20, repeats=3)

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def mlp() -> Job:
    """Four layers of 256, on 4,096 vectors."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
    return training(model, lambda x: model(x).square().mean()), (torch.randn(4096, 256),)


def convolutions() -> Job:
    """Four convolutions with batch norms, on 16 images of 64 x 64 with 16 channels."""
    layers = (
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(4)
    )
    model = nn.Sequential(*layers)
    return training(model, lambda x: model(x).square().mean()), (torch.randn(16, 16, 64, 64),)


def char_gpt() -> Job:
    """The demo's model with three layers of 128, on 16 texts of 128 characters."""
    model = CharacterGPT(Demo(layers=3, width=128, heads=4))
    texts = torch.randint(0, 128, (16, 128))
    return training(model, lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten())), (texts,)


def training(
    model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss

    return step


MODELS: dict[str, Build] = {"mlp": mlp, "convolutions": convolutions, "char-gpt": char_gpt}


def compare(machine: Machine, folder: Path) -> Iterator[dict[str, Any]]:
    """One record for each model."""
    wire, path, costs_path = Link(SLOW_BYTES_PER_S, LATENCY_S), folder / "m.json", folder / "p.json"
    save(machine.but(h2d=wire, d2h=wire, duplex=2.0), path)
    throttled = {"machine": str(path), "throttle": True}
    for model, build in MODELS.items():
        torch._dynamo.reset()
        steps = {("", plan): compile_step(build, {"policy": plan}) for plan in PROFILED}
        save(profile(steps, run_in_turn(steps, PROFILE_REPEATS)), costs_path)
        budget_bytes = bytes_at_level(steps["", "resident"]())
        options = {"profile": str(costs_path), "memory_budget": budget_bytes, **throttled}
        options["work_limit"] = LIMIT_S
        steps["slow", "auto"] = compile_step(build, options)
        timelines = run_in_turn(steps, REPEATS)
        tight = steps["slow", "auto"]()
        costs = profile(steps, timelines)
        told = record(model, "0.01 GB/s", "auto", tight, costs, timelines["slow", "auto"])
        names, dataflow = tight.plan.placement.recomputed, tight.problem.dataflow
        if not names:
            raise RuntimeError(f"the plan of {model} makes nothing again: nothing is compared")
        save(tight.plan, folder / "plan.json")
        same = {**options, "plan": str(folder / "plan.json")}
        equal = losses(build, {"policy": "resident"}) == losses(build, same)
        yield {
            **told,
            "budget_bytes": budget_bytes,
            "resident_bytes": steps["", "resident"]().plan.predicted.peak_bytes[Tier.DEVICE],
            "values_made_again": len(names),
            "bytes_made_again": sum(dataflow.buffer[name].nbytes for name in names),
            "losses_equal": equal,
        }


def bytes_at_level(resident: CompiledStep) -> int:
    """What the device needs with a level of values made again, and all else on the device."""
    levels = Levels(resident.problem)
    level = levels.variant(min(LEVEL, levels.count))
    plan = schedule(resident.problem, level.by_rule("resident"))
    return plan.predicted.peak_bytes[Tier.DEVICE]


def losses(build: Build, options: dict[str, Any]) -> list[float]:
    """The losses of a few steps whose updates run op by op, wherever they run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    step, arguments = build()
    options = {**options, "host_kernels": "captured"}
    compiled = torch.compile(step, backend="cotrain", options=options)
    return [compiled(*arguments).item() for _ in range(STEPS)]


def table(result: Result) -> str:
    """A row for each model."""
    rows = [
        (
            f"{r['model']}, {r['link']}",
            f"{format_bytes(r['budget_bytes'])} of {format_bytes(r['resident_bytes'])}",
            f"{r['values_made_again']} values, {format_bytes(r['bytes_made_again'])}",
            format_seconds(r["predicted_s"]),
            format_seconds(r["measured_s"]["median"]),
            f"{100 * r['time_error']:+.1f} %",
            f"{r['predicted_peak_bytes'] - r['measured_peak_bytes']:+d} B",
            "equal" if r["losses_equal"] else "differ",
        )
        for r in result["records"]
    ]
    headings = ("model, link", "device memory of what resident takes", "made again", "predicted")
    more = ("measured", "error", "peak predicted", "losses and resident's")
    return markdown((*headings, *more), rows)


def main() -> None:
    """Measure, print a line for each model, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for each in compare(calibrate(sizes=SIZES).machine, Path(folder)):
            records.append(each)
            print(each, flush=True)
    errors = [abs(r["time_error"]) for r in records]
    summary = {
        "time_error_median": statistics.median(errors),
        "time_error_worst": max(errors),
        "peak_error_worst": max(abs(r["peak_error"]) for r in records),
        "losses_equal": all(r["losses_equal"] for r in records),
    }
    result = {"summary": summary, "records": records}
    write_report(output, __doc__.splitlines()[0], result)
    Console(soft_wrap=True).print(table(result))


if __name__ == "__main__":
    main()
