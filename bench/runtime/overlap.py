"""What do overlapping steps gain? Simulated on a Llama step, measured on the emulated device.

Simulated: the 1B step of `docs/examples/llama.py`, with clipping, on machines and budgets where it
does not fit. For each policy the step by itself and the period with `overlap_steps`; where both are
the same, overlapping is no gain and the plan does without. Measured: a clipped MLP with every
update on the host and throttled links, seconds a step over many steps up to the end of the last
what it defers, beside what the simulator predicts from a profile of the same model. One thread for
each side, so that two cores are a device and a host; the best of several rounds, since others use
the machine.

    python -m bench.runtime.overlap -o bench/results/overlap.json

With `--step` the step is not traced but read from a file of `cotrain-compile trace`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import cotrain_compile
from bench.report import write_report
from bench.runtime.simulated_vs_measured import (
    LATENCY_S,
    await_quiet,
    compile_step,
    profile,
    run_in_turn,
)
from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.files import load, save
from cotrain_compile.jobs import load_job
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.calibrate.calibrate import calibrate

JOB = "docs/examples/llama.py:llama_1b"
GIB = 1 << 30
MACHINES = ("rtx4090", "a100-80", "gh200")
BUDGETS_GIB = (22,)
POLICIES = ("zero-offload", "coarse", "auto")
ROUNDS, STEPS = 9, 6


def simulated(dataflow: Dataflow, policies: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One record for each machine, budget and policy that fits."""
    for machine in MACHINES:
        for budget in BUDGETS_GIB:
            budgets = {Tier.DEVICE: budget * GIB, Tier.HOST: 192 * GIB}
            problem = formulate(dataflow, find(machine), budgets)
            for policy in policies:
                plans: list[Plan] = []
                try:
                    for overlap in (False, True):
                        settings = SolveSettings(policy, overlap_steps=overlap)
                        # The plan of one step is known when many are asked for: time limits
                        # are in seconds, and on a busy machine no two runs are the same.
                        plans.append(solve(problem, settings, incumbents=plans))
                except cotrain_compile.errors.PlacementError:
                    continue
                yield {"machine": machine, "budget_gib": budget, "policy": policy, **gain(*plans)}


def gain(alone: Plan, overlapping: Plan) -> dict[str, Any]:
    """Seconds of both plans' steps; the bound is on steps that may overlap."""
    step_s, period_s = alone.predicted.makespan_s, overlapping.predicted.makespan_s
    assert overlapping.report is not None
    return {
        "chosen": overlapping.placement.policy,
        "deferred": len(overlapping.deferred),
        "step_s": step_s,
        "period_s": period_s,
        "gain": 1 - period_s / step_s,
        "bound_s": overlapping.report.lower_bound_s or None,
    }


def clipped_mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Six wide layers, clipped: no update starts before the backward has ended."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (torch.randn(256, 1024), torch.randn(256, 1024))


def measured(machine: Machine, folder: Path) -> dict[str, Any]:
    """Seconds a step with and without overlap, measured and predicted."""
    save(machine, folder / "machine.json")
    shared: dict[str, Any] = {"machine": str(folder / "machine.json")}
    plain = {("", p): compile_step(clipped_mlp, {**shared, "policy": p}) for p in PROFILED}
    costs = profile(plain, run_in_turn(plain, 5))
    save(costs, folder / "profile.json")
    shared |= {"policy": "zero-offload", "throttle": True, "profile": str(folder / "profile.json")}
    runs = {}
    for overlap in (False, True):
        # Compiled steps are told apart by their code and what it closes over.
        torch._dynamo.reset()
        runs[overlap] = compile_step(clipped_mlp, {**shared, "overlap_steps": overlap})
        runs[overlap]()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        await_quiet()
        for overlap, run in runs.items():
            seconds[overlap].append(seconds_a_step(run))
    compiled = {overlap: run() for overlap, run in runs.items()}
    best_s = {overlap: min(values) for overlap, values in seconds.items()}
    predicted_s = {overlap: predicted(step, costs) for overlap, step in compiled.items()}
    return {
        "deferred": len(compiled[True].plan.deferred),
        "step_s": best_s[False],
        "period_s": best_s[True],
        "gain": 1 - best_s[True] / best_s[False],
        "predicted_step_s": predicted_s[False],
        "predicted_period_s": predicted_s[True],
        "predicted_gain": 1 - predicted_s[True] / predicted_s[False],
        "all_step_s": seconds[False],
        "all_period_s": seconds[True],
    }


PROFILED = ("resident", "zero-offload")


def seconds_a_step(run: Callable[[], CompiledStep]) -> float:
    """Mean of `STEPS` steps one after the other, the last with what it defers."""
    run()
    began_s = time.perf_counter()
    for _ in range(STEPS):
        run()
    cotrain_compile.synchronize()
    return (time.perf_counter() - began_s) / STEPS


def predicted(step: CompiledStep, costs: CostTable) -> float:
    """The step of its plan with the profile's costs."""
    problem, plan = step.problem, step.plan
    again = formulate(problem.dataflow, problem.machine, problem.budgets, costs)
    return predict(place_plan(again, plan)).makespan_s


def main() -> None:
    """Simulate, measure, print a line for each, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--step", type=Path, help=f"as traced from {JOB}")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--simulated-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    emulated = None if arguments.simulated_only else emulate(console)
    step = load(arguments.step, Dataflow) if arguments.step else trace(load_job(JOB))
    records = []
    for record in simulated(step, arguments.policies):
        records.append(record)
        console.print(
            f"{record['machine']:10}{record['budget_gib']} GiB  {record['policy']:14}"
            f"{record['step_s']:.4f} s a step, {record['period_s']:.4f} s overlapping: "
            f"{record['gain']:.1%}"
        )
    result = {"emulated": emulated, "simulated": {"job": JOB, "records": records}}
    write_report(arguments.output, (__doc__ or "").splitlines()[0], result)


def emulate(console: Console) -> dict[str, Any]:
    """Measure, and print a line."""
    slow = Link(1e9, LATENCY_S)
    machine = calibrate().machine.but(name="1 GB/s", d2h=slow, h2d=slow)
    with tempfile.TemporaryDirectory() as folder:
        emulated = measured(machine, Path(folder))
    console.print(
        f"emulated  {emulated['step_s'] * 1e3:.1f} ms a step, {emulated['period_s'] * 1e3:.1f} ms "
        f"overlapping: {emulated['gain']:.1%} ({emulated['predicted_gain']:.1%} predicted)"
    )
    torch._dynamo.reset()
    return emulated


if __name__ == "__main__":
    main()
