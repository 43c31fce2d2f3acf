"""What do updates before the norm is known gain? Simulated on Llama steps, measured on an MLP.

A clipped step in five ways: every update waits for the norm; updates on the host may go on under
the next step (`overlap_steps`); they may begin before the norm is known, in a plan that waits
(`speculate` "auto", hedged) or in one that counts on it ("on"); the last and overlapping steps.
Simulated: steps of `docs/examples/llama.py` with the certified bound of each way, and, of the
third, what a step takes that clips after all, and up to which share of clipped steps it pays.
Measured: a wide MLP with every update on the host and throttled links of an emulated device, where
nothing is clipped; and where everything is, with guesses made all the same, and held back. One
thread for each side; the best of several rounds in turn.

    python -m bench.runtime.speculation --measured-only -o bench/results/speculation.json

With `--steps` the steps are not traced but read from files of `cotrain-compile trace`. With
`--measured-only`, two minutes, the simulated rows of the output stay as they are, and with
`--simulated-only` the measured ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import cotrain_compile
from bench.report import write_report
from bench.results_page.tables import markdown, percent
from bench.runtime.simulated_vs_measured import (
    LATENCY_S,
    await_quiet,
    compile_step,
    profile,
    run_in_turn,
)
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.files import load, save
from cotrain_compile.jobs import load_job
from cotrain_compile.machine import Link, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.outcomes import outcomes
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.support.units import format_seconds

JOB = "docs/examples/llama.py:{}"
GIB = 1 << 30
HOST_GIB, TIME_LIMIT_S = 2048, 5.0
# Step, machine, GiB of the device, policy.
ROWS = (
    ("llama_1b", "rtx4090", 22, "coarse"),
    ("llama_1b", "h100", 22, "coarse"),
    ("llama_1b", "rtx4090", 22, "auto"),
)
# What the search may do.
WAYS: dict[str, dict[str, Any]] = {
    "waits": {},
    "overlaps": {"overlap_steps": True},
    "hedged": {"speculate": True, "hedged": True},
    "speculates": {"speculate": True},
    "both": {"overlap_steps": True, "speculate": True},
}
WIDTH, LAYERS, BATCH = 2048, 6, 64
ROUNDS, STEPS = 3, 4
# Steps until a gate has opened, where nothing is clipped.
OPENED = 12
PROFILED = ("resident", "zero-offload")
FREE, CLIPPED = 1e-3, 1e3  # of the loss, whose gradients are clipped to a norm of 1


def simulated(steps: Callable[[str], Dataflow]) -> Iterator[dict[str, Any]]:
    """One record for each of `ROWS`."""
    for job, machine, gib, policy in ROWS:
        problem = formulate(
            steps(job), find(machine), {Tier.DEVICE: gib * GIB, Tier.HOST: HOST_GIB * GIB}
        )
        plans: dict[str, Plan] = {}
        for way, allowed in WAYS.items():
            # What one way has found the others that allow it know, as on a busy machine no two runs
            # of a solver are the same.
            known = tuple(plans.values())
            settings = SolveSettings(policy, work_limit=TIME_LIMIT_S, **allowed)
            plans[way] = solve(problem, settings, incumbents=known)
            check(problem, plans[way])
        plan = plans["speculates"]
        found = outcomes(problem, plan) if plan.speculations else None
        yield {
            "job": job,
            "machine": machine,
            "gib": gib,
            "policy": policy,
            "step_s": {way: p.predicted.makespan_s for way, p in plans.items()},
            "bound_s": {way: p.report.lower_bound_s for way, p in plans.items() if p.report},
            "host_bytes": {w: p.predicted.peak_bytes[Tier.HOST] for w, p in plans.items()},
            "updates": len(plan.host_updates),
            "speculative": len(plan.speculations),
            "clipped_s": found.wrong_s if found else None,
            "held_back_s": found.held_back_s if found else None,
            "pays_below": found.pays_below if found else None,
        }


def mlp(scale: float) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Wide layers, few samples: the host takes as long for the updates as the backward."""

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * scale
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        return step, (*batch, torch.tensor(scale))

    return build


def measured(folder: Path) -> dict[str, Any]:
    """Seconds a step of each way, and of steps that all clip."""
    link = Link(4e9, LATENCY_S)
    save(calibrate().machine.but(name="4 GB/s", d2h=link, h2d=link), folder / "machine.json")
    shared: dict[str, Any] = {"machine": str(folder / "machine.json"), "quiet": True}
    plain = {("", p): compile_step(mlp(FREE), {**shared, "policy": p}) for p in PROFILED}
    save(profile(plain, run_in_turn(plain, 5)), folder / "profile.json")
    shared |= {"policy": "coarse", "throttle": True, "profile": str(folder / "profile.json")}
    cases: dict[str, tuple[float, dict[str, Any]]] = {
        "waits": (FREE, {}),
        "overlaps": (FREE, {"overlap_steps": True}),
        "hedged": (FREE, {"speculate": "auto"}),
        "speculates": (FREE, {"speculate": "on"}),
        "both": (FREE, {"speculate": "on", "overlap_steps": True}),
        "waits, clipped": (CLIPPED, {}),
        "speculates, clipped": (CLIPPED, {"speculate": "on"}),
        "held back, clipped": (CLIPPED, {"speculate": "auto"}),
    }
    runs = {}
    for name, (scale, options) in cases.items():
        # Compiled steps are told apart by their code and what it closes over.
        torch._dynamo.reset()
        runs[name] = compile_step(mlp(scale), {**shared, **options})
        for _ in range(OPENED if name == "hedged" else 2):
            runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        await_quiet()
        for name, run in runs.items():
            seconds[name].append(_seconds_a_step(run))
    compiled = {name: run() for name, run in runs.items()}
    return {
        "speculative": {name: len(c.plan.speculations) for name, c in compiled.items()},
        "step_s": {name: min(values) for name, values in seconds.items()},
        "predicted_s": {name: c.predicted.makespan_s for name, c in compiled.items()},
        "all_s": seconds,
    }


def _seconds_a_step(run: Callable[[], Any]) -> float:
    """Mean of `STEPS` steps one after the other, the last with what it defers."""
    run()
    began_s = time.perf_counter()
    for _ in range(STEPS):
        run()
    cotrain_compile.synchronize()
    return (time.perf_counter() - began_s) / STEPS


def table(result: Mapping[str, Any]) -> str:
    """Simulated rows, then the measured step in each way."""
    simulated_in = [way for way in WAYS if all(way in r["step_s"] for r in result["simulated"])]
    rows = [
        (
            f"{r['job']}, {r['machine']}, {r['gib']} GiB, {r['policy']}",
            *(format_seconds(r["step_s"][way]) for way in simulated_in),
            percent(1 - r["step_s"]["speculates"] / r["step_s"]["waits"]),
            f"{r['speculative']} of {r['updates']}",
            format_seconds(r["clipped_s"]) if r["clipped_s"] else "",
            percent(r["pays_below"]) if r["pays_below"] else "",
            " / ".join(format_seconds(r["bound_s"][w]) for w in ("waits", "speculates"))
            if r["bound_s"]["waits"]
            else "",
        )
        for r in result["simulated"]
    ]
    head = ("step, machine, budget, policy", *simulated_in, "gain", "on guesses", "if it clips")
    text = markdown((*head, "pays below", "bounds, waiting / on guesses"), rows)
    if (found := result["measured"]) is None:
        return text
    steps = [
        (name, format_seconds(found["step_s"][name]), str(found["speculative"][name]))
        for name in found["step_s"]
    ]
    return f"{text}\n{markdown(('emulated MLP', 'measured step', 'updates on guesses'), steps)}"


def main() -> None:
    """Measure, simulate, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=Path, help="folder with llama_1b.json")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--simulated-only", action="store_true")
    only.add_argument("--measured-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    question = (__doc__ or "").splitlines()[0]
    before: dict[str, Any] = {"measured": None, "simulated": []}
    if (arguments.simulated_only or arguments.measured_only) and arguments.output.exists():
        before |= json.loads(arguments.output.read_text())["result"]
    emulated = before["measured"]
    if not arguments.simulated_only:
        with tempfile.TemporaryDirectory() as folder:
            emulated = measured(Path(folder))
        console.print(emulated["step_s"])
    if arguments.measured_only:
        write_report(arguments.output, question, {**before, "measured": emulated})
        return
    cache: dict[str, Dataflow] = {}

    def step(job: str) -> Dataflow:
        if job not in cache:
            path = arguments.steps / f"{job}.json" if arguments.steps else None
            cache[job] = load(path, Dataflow) if path else trace(load_job(JOB.format(job)))
        return cache[job]

    records = []
    for record in simulated(step):
        records.append(record)
        console.print(record)
        # After each row, as they take minutes.
        result = {"measured": emulated, "simulated": records}
        write_report(arguments.output, question, result)


if __name__ == "__main__":
    main()
