"""Does the simulator tell the truth? Predicted against measured steps on the emulated device.

For every model, link speed and plan: the step's time and device peak that the plan predicts, and
what the emulated device with throttled links measures. Op and update times come from a profile of
the same model (resident and zero-offload, links not throttled); links, contention and the rest of
the machine from calibration. All steps of a model are run in turn, so that prediction and
measurement see the same machine even when others use it too. One thread for each side, so that two
cores are a device and a host.

    python -m bench.simulated_vs_measured -o bench/results/simulated_vs_measured.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import cotrain_compile
from bench.report import write_report
from cotrain_compile.analysis.costs import CostTable, measured_costs, with_measured
from cotrain_compile.backends.compiled_step import CompiledStep
from cotrain_compile.demo.model import CharacterGPT, Shape
from cotrain_compile.files import save
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.placement.predict import predict
from cotrain_compile.plan import Timeline
from cotrain_compile.runtime.calibrate import calibrate

PROFILED = ("resident", "zero-offload")
PLANS = ("resident", "zero-offload", "coarse", "fraction:0.5")
LINKS_BYTES_PER_S = {"1 GB/s": 1e9, "4 GB/s": 4e9}
WARM_UP, REPEATS = 3, 9

Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Six wide layers: large parameters, little compute."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)])
    return _step(lambda x, y: F.mse_loss(model(x), y), model), (
        torch.randn(256, 1024),
        torch.randn(256, 1024),
    )


def char_gpt() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The demo's model, smaller."""
    model = CharacterGPT(Shape(layers=4, width=256, heads=4))
    x, y = torch.randint(0, 128, (8, 128)), torch.randint(0, 128, (8, 128))
    return _step(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), model), (x, y)


def llama() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A small Hugging Face Llama with its real block structure."""
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        vocab_size=4096,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    x, y = torch.randint(0, 4096, (4, 128)), torch.randint(0, 4096, (4, 128))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())

    return _step(loss, model), (x, y)


MODELS: dict[str, Build] = {"mlp": mlp, "char-gpt": char_gpt, "llama": llama}


def _step(loss_of: Callable[..., torch.Tensor], model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def compile_step(build: Build, options: dict[str, Any]) -> Callable[[], CompiledStep]:
    """A function that runs the step once and returns its `CompiledStep`."""
    torch.manual_seed(0)
    step, arguments = build()
    compiled = torch.compile(step, backend="cotrain", options={"poison": False, **options})

    def run() -> CompiledStep:
        compiled(*arguments)
        return cotrain_compile.inspect(compiled)

    return run


def compare(machine: Machine, folder: Path) -> Iterator[dict[str, Any]]:
    """One record for each model, link speed and plan."""
    for model, build in MODELS.items():
        torch._dynamo.reset()
        steps = {("", plan): compile_step(build, {"policy": plan}) for plan in PROFILED}
        for link, bytes_per_s in LINKS_BYTES_PER_S.items():
            wire = Link(bytes_per_s, latency_s=50e-6)
            path = folder / "machine.json"
            save(replace(machine, h2d=wire, d2h=wire, duplex=2.0), path)
            for plan in PLANS:
                options = {"policy": plan, "machine": str(path), "throttle": True}
                steps[link, plan] = compile_step(build, options)
                steps[link, plan]()  # compiled now, while the file holds this machine
        timelines = run_in_turn(steps)
        costs = profile(timelines)
        for link in LINKS_BYTES_PER_S:
            for plan in PLANS:
                step = steps[link, plan]()
                yield record(model, link, plan, predicted(step, costs), timelines[link, plan])


def run_in_turn(
    steps: dict[tuple[str, str], Callable[[], CompiledStep]],
) -> dict[tuple[str, str], list[Timeline]]:
    """What each of `steps` measures in `REPEATS` rounds after a warm-up."""
    timelines: dict[tuple[str, str], list[Timeline]] = {key: [] for key in steps}
    for round_ in range(WARM_UP + REPEATS):
        for key, step in steps.items():
            measured = step().measured
            assert measured is not None
            if round_ >= WARM_UP:
                timelines[key].append(measured)
    return timelines


def profile(timelines: dict[tuple[str, str], list[Timeline]]) -> CostTable:
    """Op times from resident steps, update times from steps that update on the host."""
    device, host = (measured_costs(timelines["", plan]) for plan in PROFILED)
    return replace(device, host_update_s=host.host_update_s)


def predicted(step: CompiledStep, costs: CostTable) -> Timeline:
    """What the simulator says of the step's plan with measured costs."""
    known = with_measured(
        step.problem.costs, device_s=costs.device_s, host_update_s=costs.host_update_s
    )
    problem = replace(step.problem, costs=known)
    return predict(problem, step.plan.placement, step.plan.tasks)


def record(
    model: str, link: str, plan: str, predicted: Timeline, measured: list[Timeline]
) -> dict[str, Any]:
    """Predicted and measured time and peak, with their relative differences."""
    seconds = [timeline.makespan_s for timeline in measured]
    median_s = statistics.median(seconds)
    peak = max(timeline.peak_bytes[Tier.DEVICE] for timeline in measured)
    return {
        "model": model,
        "link": link,
        "plan": plan,
        "predicted_s": predicted.makespan_s,
        "measured_s": {"median": median_s, "min": min(seconds), "max": max(seconds)},
        "time_error": predicted.makespan_s / median_s - 1,
        "predicted_peak_bytes": predicted.peak_bytes[Tier.DEVICE],
        "measured_peak_bytes": peak,
        "peak_error": predicted.peak_bytes[Tier.DEVICE] / peak - 1,
    }


def main() -> None:
    """Measure, print a line for each comparison, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    machine = calibrate().machine
    with tempfile.TemporaryDirectory() as folder:
        records = []
        for result in compare(machine, Path(folder)):
            records.append(result)
            console.print(
                f"{result['model']:10}{result['link']:8}{result['plan']:14}"
                f"{result['predicted_s'] * 1e3:8.1f} ms predicted"
                f"{result['measured_s']['median'] * 1e3:8.1f} ms measured"
                f"{result['time_error']:+8.1%}   peak {result['peak_error']:+.2%}"
            )
    errors = sorted(abs(r["time_error"]) for r in records)
    summary = {
        "time_error_median": statistics.median(errors),
        "time_error_worst": errors[-1],
        "peak_error_worst": max(abs(r["peak_error"]) for r in records),
    }
    write_report(output, __doc__.splitlines()[0], {"summary": summary, "records": records})
    table = Table("", "value")
    for name, value in summary.items():
        table.add_row(name, f"{value:.2%}")
    console.print(table)


if __name__ == "__main__":
    main()
