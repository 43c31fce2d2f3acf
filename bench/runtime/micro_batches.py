"""Micro-batches as written and layer by layer: do they take what their plans say? Emulated.

A transformer whose weights do not fit, eight micro-batches, a throttled link of 0.1 GB/s: `auto` in
both orders, in little more than what the step needs as it is written, and by layer in 60 % of that,
with a profile of the same model. Told are the predicted and the measured time and device peak, and
how often each weight on the host comes to the device in a step. Profile and steps are measured in
the same rounds, as by `simulated_vs_measured`, and of each the fastest fifth counts.

    python -m bench.runtime.micro_batches -o bench/results/micro_batches.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional as F

from bench.report import write_report
from bench.results_page.tables import Result, markdown
from bench.runtime.simulated_vs_measured import (
    LATENCY_S,
    PROFILE_REPEATS,
    PROFILED,
    compile_step,
    profile,
    record,
    run_in_turn,
    with_profile,
)
from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load, save
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.support.units import format_bytes, format_seconds

BYTES_PER_S, LIMIT_S, REPEATS, MICRO_BATCHES = 1e8, 60.0, 10, 8
# Of the machine only the links count, which are set here: every op and update has a measured time.
SIZES = Sizes(copy_bytes=1 << 24, matmul_side=512, updated_parameters=1 << 20, repeats=3)
CASES = (("as-written", 1.05), ("by-layer", 1.05), ("by-layer", 0.6))


def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The demo's model with four layers of 192, one text of 64 characters in a micro-batch."""
    model = CharacterGPT(Shape(layers=4, width=192, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(texts: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x in texts.chunk(MICRO_BATCHES):
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten()) / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step, (torch.randint(0, 128, (MICRO_BATCHES, 64)),)


def compare(machine: Machine, folder: Path) -> Iterator[dict[str, Any]]:
    """One record for each order and budget."""
    wire, path, costs_path = Link(BYTES_PER_S, LATENCY_S), folder / "m.json", folder / "p.json"
    save(machine.but(h2d=wire, d2h=wire, duplex=2.0), path)
    steps = {("", plan): compile_step(build, {"policy": plan}) for plan in PROFILED}
    save(profile(steps, run_in_turn(steps, PROFILE_REPEATS)), costs_path)
    least = least_as_written(steps["", "resident"](), load(costs_path, CostTable))
    budgets = {}
    for order, share in CASES:
        budgets[order, f"{share:.0%}"] = int(share * least)
        steps[order, f"{share:.0%}"] = compile_step(
            build,
            {
                "micro_batch_order": order,
                "memory_budget": int(share * least),
                "profile": str(costs_path),
                "machine": str(path),
                "throttle": True,
                "work_limit": LIMIT_S,
            },
        )
    timelines = run_in_turn(steps, REPEATS)
    costs = profile(steps, timelines)
    for (order, share), budget_bytes in budgets.items():
        step = steps[order, share]()
        told = record("char-gpt", "0.1 GB/s", order, step, costs, timelines[order, share])
        weights = fetched(step.plan)
        yield {
            **told,
            "budget_bytes": budget_bytes,
            "least_as_written_bytes": least,
            "layers_per_pack": step.plan.placement.layers_per_pack,
            "weights_fetched": len(weights),
            "most_fetches_of_a_weight": max(weights.values(), default=0),
            "up_bytes": step.plan.bytes_moved("prefetch"),
        }


def least_as_written(resident: CompiledStep, costs: CostTable) -> int:
    """What the step needs on the device in its own order."""
    problem = with_profile(resident, costs).with_budget(Tier.DEVICE, 1)
    try:
        solve(problem, SolveSettings(micro_batch_order="as-written"))
    except PlacementError as error:
        return 1 + error.shortfall_bytes
    raise RuntimeError("the step fits in a byte")


def fetched(plan: Plan) -> Counter[str]:
    """How often each weight at home on the host comes to the device in a step."""
    homes, updates = plan.placement.homes, plan.placement.updates
    on_host = {name for name in updates if homes[name] is Tier.HOST}
    return Counter(task.buffer for task in plan.transfers if task.is_fetch) & Counter(
        dict.fromkeys(on_host, 1 << 20)
    )


def table(result: Result) -> str:
    """A row for each order and budget."""
    rows = [
        (
            r["plan"] + (f", packs of {r['layers_per_pack']}" if r["layers_per_pack"] else ""),
            f"{format_bytes(r['budget_bytes'])}",
            f"{r['weights_fetched']}, at most {r['most_fetches_of_a_weight']} times",
            format_bytes(r["up_bytes"]),
            format_seconds(r["predicted_s"]),
            format_seconds(r["measured_s"]["median"]),
            f"{100 * r['time_error']:+.1f} %",
            f"{r['predicted_peak_bytes'] - r['measured_peak_bytes']:+d} B",
        )
        for r in result["records"]
    ]
    headings = ("order", "device memory", "weights fetched", "up each step", "predicted")
    return markdown((*headings, "measured", "error", "peak predicted"), rows)


def main() -> None:
    """Measure, print a line for each case, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for each in compare(calibrate(sizes=SIZES).machine, Path(folder)):
            records.append(each)
            print(each, flush=True)
    summary = {"time_error_worst": max(abs(r["time_error"]) for r in records)}
    result = {"summary": summary, "records": records}
    write_report(output, __doc__.splitlines()[0], result)
    Console(soft_wrap=True).print(table(result))


if __name__ == "__main__":
    main()
