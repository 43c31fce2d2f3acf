"""Does the simulator tell the truth? Predicted against measured steps on the emulated device.

For every model, link speed and plan: the step's time and device peak that the plan predicts, and
what the emulated device with throttled links measures. Op and update times come from a profile of
the same model (resident and zero-offload, links not throttled); links, contention and the rest of
the machine from calibration. One plan of each model is that of the integer program, solved with
such a profile for a budget between the least feasible one and what resident needs. All steps of a
model are run in rounds, each in another order, when the machine is quiet or has not been for a
while, and of each the fastest fifth counts, so that prediction and measurement see the same machine
even when others use it too. One thread for each side, so that two cores are a device and a host.

    python -m bench.runtime.simulated_vs_measured -o bench/results/simulated_vs_measured.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from cotrain_compile.analysis.costs import CostTable, measured_costs
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load, save
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.viz.kinds import kinds_of

PROFILED = ("resident", "zero-offload")
PLANS = (
    *("resident", "zero-offload", "coarse", "fraction:0.5", "streamed"),
    *("zero-infinity", "fsdp-offload"),
)
LINKS_BYTES_PER_S = {"1 GB/s": 1e9, "4 GB/s": 4e9}
# An emulated copy takes that much however small it is: its thread is woken, and waits for Python.
LATENCY_S = 250e-6
# Where the integer program is asked: the link, and the budget as the part of the way from the least
# feasible one to resident.
AUTO = {"mlp": ("4 GB/s", 0.3), "char-gpt": ("1 GB/s", 0.15), "llama": ("1 GB/s", 0.3)}
WARM_UP, REPEATS, PROFILE_REPEATS = 3, 25, 5
QUIET_LIMIT_S = 5.0

Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Six wide layers: large parameters, little compute."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)])
    return step_of(lambda x, y: F.mse_loss(model(x), y), model), (
        torch.randn(256, 1024),
        torch.randn(256, 1024),
    )


def char_gpt() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The demo's model, smaller."""
    model = CharacterGPT(Shape(layers=4, width=256, heads=4))
    x, y = torch.randint(0, 128, (8, 128)), torch.randint(0, 128, (8, 128))
    return step_of(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), model), (x, y)


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

    return step_of(loss, model), (x, y)


MODELS: dict[str, Build] = {"mlp": mlp, "char-gpt": char_gpt, "llama": llama}


def step_of(loss_of: Callable[..., torch.Tensor], model: nn.Module) -> Callable[..., Any]:
    """A step of AdamW."""
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
        before = folder / "profile.json"
        save(profile(steps, run_in_turn(steps, PROFILE_REPEATS)), before)
        for link, bytes_per_s in LINKS_BYTES_PER_S.items():
            wire = Link(bytes_per_s, LATENCY_S)
            path = folder / "machine.json"
            save(machine.but(h2d=wire, d2h=wire, duplex=2.0), path)
            throttled = {"machine": str(path), "throttle": True}
            for plan in PLANS:
                steps[link, plan] = compile_step(build, {"policy": plan, **throttled})
                steps[link, plan]()  # compiled now, while the file holds this machine
            auto_link, share = AUTO[model]
            if link == auto_link:
                budget = {"memory_budget": part_way(steps[link, "resident"](), before, share)}
                options = {"policy": "auto", "profile": str(before), **budget, **throttled}
                steps[link, f"auto at {share:.0%}"] = compile_step(build, options)
                steps[link, f"auto at {share:.0%}"]()
        timelines = run_in_turn(steps, REPEATS)
        costs = profile(steps, timelines)
        for (link, plan), step in steps.items():
            if link:
                yield record(model, link, plan, step(), costs, timelines[link, plan])


def part_way(resident: CompiledStep, profile: Path, share: float) -> int:
    """Bytes on the device: `share` of the way from what the step needs at the least to resident."""
    problem = with_profile(resident, load(profile, CostTable))
    try:
        solve(problem.with_budget(Tier.DEVICE, 1))
    except PlacementError as error:
        least = 1 + error.shortfall_bytes
    return least + int(share * (resident.predicted.peak_bytes[Tier.DEVICE] - least))


def run_in_turn(
    steps: dict[tuple[str, str], Callable[[], CompiledStep]], repeats: int
) -> dict[tuple[str, str], list[Timeline]]:
    """What each of `steps` measures in the fastest fifth of `repeats` rounds after a warm-up.

    Each round goes in an order of its own: the first after a pause finds cold caches, and each one
    those that the one before has left.
    """
    order = random.Random(0)
    timelines: dict[tuple[str, str], list[Timeline]] = {key: [] for key in steps}
    for round_ in range(WARM_UP + repeats):
        await_quiet()
        for key in order.sample(list(steps), len(steps)):
            measured = steps[key]().measured
            assert measured is not None
            if round_ >= WARM_UP:
                timelines[key].append(measured)
    return {
        key: sorted(measured, key=lambda timeline: timeline.makespan_s)[: repeats // 5]
        for key, measured in timelines.items()
    }


def await_quiet() -> None:
    """Return when nobody uses the processors, or after `QUIET_LIMIT_S`."""
    deadline_s = time.monotonic() + QUIET_LIMIT_S
    while idle_share() < 0.9 and time.monotonic() < deadline_s:
        pass


def idle_share() -> float:
    """The part of the processors' time, over half a second, that nobody uses."""
    idle, total = [], []
    for pause_s in (0.5, 0.0):
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        idle.append(ticks[3])  # proc(5): user, nice, system, idle, ...
        total.append(sum(ticks))
        time.sleep(pause_s)
    return (idle[1] - idle[0]) / max(1, total[1] - total[0])


def profile(
    steps: Mapping[tuple[str, str], Callable[[], CompiledStep]],
    timelines: Mapping[tuple[str, str], list[Timeline]],
) -> CostTable:
    """Op times from resident steps, update times from steps that update on the host."""
    keys = [("", plan) for plan in PROFILED]
    device, host = (measured_costs(timelines[key], steps[key]().plan) for key in keys)
    return replace(device, host_update_s=host.host_update_s)


def with_profile(step: CompiledStep, costs: CostTable) -> Problem:
    """The step's problem with measured costs."""
    problem = step.problem
    return formulate(problem.dataflow, problem.machine, problem.budgets, costs)


def record(
    model: str, link: str, name: str, step: CompiledStep, costs: CostTable, measured: list[Timeline]
) -> dict[str, Any]:
    """What the plan does, its predicted and measured time and peak, and how far they are apart."""
    plan = step.plan
    predicted = predict(place_plan(with_profile(step, costs), plan))
    seconds = [timeline.makespan_s for timeline in measured]
    median_s = statistics.median(seconds)
    peak = max(timeline.peak_bytes[Tier.DEVICE] for timeline in measured)
    return {
        "model": model,
        "link": link,
        "plan": name,
        **described(plan),
        "predicted_s": predicted.makespan_s,
        "measured_s": {"median": median_s, "min": min(seconds), "max": max(seconds)},
        "time_error": predicted.makespan_s / median_s - 1,
        "predicted_peak_bytes": predicted.peak_bytes[Tier.DEVICE],
        "measured_peak_bytes": peak,
        "peak_error": predicted.peak_bytes[Tier.DEVICE] / peak - 1,
    }


def described(plan: Plan) -> dict[str, Any]:
    """How parameters are kept and updated, and how many activations leave the device."""
    placement, kinds = plan.placement, kinds_of(plan)
    offloaded = {task.buffer for task in plan.transfers if kinds[task.name] == "activation"}
    return {
        "policy": placement.policy,
        "updates": Counter(mode.value for mode in placement.updates.values()),
        "weights_on_host": sum(placement.homes[p] is Tier.HOST for p in placement.updates),
        "activations_away": len(offloaded),
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
    auto = [abs(r["time_error"]) for r in records if r["plan"].startswith("auto")]
    summary = {
        "time_error_median": statistics.median(errors),
        "time_error_worst": errors[-1],
        "time_error_auto_worst": max(auto),
        "peak_error_worst": max(abs(r["peak_error"]) for r in records),
    }
    write_report(output, __doc__.splitlines()[0], {"summary": summary, "records": records})
    table = Table("", "value")
    for name, value in summary.items():
        table.add_row(name, f"{value:.2%}")
    console.print(table)


if __name__ == "__main__":
    main()
