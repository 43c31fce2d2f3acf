"""Is CoTrain's early update worth what the simulator says? Against ZeRO-Offload's, on one step.

Both update every parameter on the host. ZeRO-Offload starts when the backward is over, CoTrain's
`coarse` plan when a gradient has landed, so that updates of about the backward's length disappear
under it. The emulated device runs both in turn with a throttled link and one thread for each side;
op and update times for the prediction come from a profile of the same step, taken in the same
rounds. All figures are medians over all rounds.

    python -m bench.plans.coarse -o bench/results/coarse_against_zero_offload.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from bench.report import write_report
from bench.runtime.simulated_vs_measured import compile_step, profile, with_profile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Phase
from cotrain_compile.files import save
from cotrain_compile.machine import Link
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Lane, Timeline
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.link_bench import Sizes

PLANS = ("zero-offload", "coarse")
WIDTH, LAYERS, BATCH = 2048, 6, 16
LINK = Link(bytes_per_s=8e9, latency_s=50e-6)
WARM_UP, REPEATS, QUICK_REPEATS = 3, 30, 2
# How far the measured ratio of the two steps may lie from the predicted one.
TOLERANCE = 0.1


def step_of(width: int) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Builds a step of wide layers on a small batch: backward and updates take about as long."""

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.randn(BATCH, width), torch.randn(BATCH, width))

    return build


def measure(width: int, repeats: int, folder: Path, sizes: Sizes | None) -> dict[str, Any]:
    """Measured and predicted seconds of both plans, and the ratio of each."""
    machine = calibrate(sizes=sizes).machine.but(h2d=LINK, d2h=LINK)
    save(machine, folder / "machine.json")
    build, throttled = step_of(width), {"machine": str(folder / "machine.json"), "throttle": True}
    steps = {("", plan): compile_step(build, {"policy": plan}) for plan in ("resident", PLANS[0])}
    for plan in PLANS:
        steps["throttled", plan] = compile_step(build, {"policy": plan, **throttled})
    timelines = rounds(steps, repeats)
    costs = profile(steps, timelines)
    rows: dict[str, Any] = {}
    for plan in PLANS:
        compiled = steps["throttled", plan]()
        problem = with_profile(compiled, costs)
        measured_s = [timeline.makespan_s for timeline in timelines["throttled", plan]]
        rows[plan] = {
            "predicted_s": predict(place_plan(problem, compiled.plan)).makespan_s,
            "measured_s": _spread(measured_s),
        }
    zero, coarse = (rows[plan] for plan in PLANS)
    predicted = coarse["predicted_s"] / zero["predicted_s"]
    pairs = zip(*(timelines["throttled", plan] for plan in PLANS), strict=True)
    ratios = _spread([early.makespan_s / late.makespan_s for late, early in pairs])
    measured = ratios["median"]
    return {
        "backward_s": backward_s(steps["", "resident"](), timelines["", "resident"]),
        "updates_s": sum(costs.host_update_s.values()),
        "plans": rows,
        "predicted_ratio": predicted,
        "measured_ratio": ratios,
        "ratio_error": measured / predicted - 1,
        "met": measured < 1 and abs(measured / predicted - 1) <= TOLERANCE,
    }


def rounds(
    steps: dict[tuple[str, str], Callable[[], CompiledStep]], repeats: int
) -> dict[tuple[str, str], list[Timeline]]:
    """What each of `steps` measures, run in turn after a warm-up."""
    timelines: dict[tuple[str, str], list[Timeline]] = {key: [] for key in steps}
    for number in range(WARM_UP + repeats):
        for key, step in steps.items():
            measured = step().measured
            assert measured is not None
            if number >= WARM_UP:
                timelines[key].append(measured)
    return timelines


def backward_s(step: CompiledStep, timelines: Sequence[Timeline]) -> float:
    """Median seconds of the backward's ops."""
    phases = {op.name: op.phase for op in step.problem.dataflow.ops}
    return statistics.median(
        sum(
            span.end_s - span.start_s
            for span in timeline.lane(Lane.DEVICE)
            if phases.get(span.name) is Phase.BACKWARD
        )
        for timeline in timelines
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print both ratios, and write the report."""
    question = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="tiny layers, two rounds")
    given = parser.parse_args(arguments)
    width, repeats, sizes = WIDTH, REPEATS, None
    if given.quick:
        width, repeats, sizes = 64, QUICK_REPEATS, Sizes(2**16, 4096, 64, 2**12, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(width, repeats, Path(folder), sizes)
    finally:
        torch.set_num_threads(before)
    write_report(given.output, question, result)
    Console(soft_wrap=True).print(result)


if __name__ == "__main__":
    main()
