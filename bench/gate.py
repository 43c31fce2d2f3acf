"""Did something get worse? Ratios and counts of fixed jobs against the numbers kept in a file.

Captured: nodes of the graph, ops of the dataflow, segments that Inductor gets and how many kinds of
them, of small jobs traced here. Solved: how far the plan of a saved step lies above its certified
bound, what the integer program claims, and what the plan moves, within a share of what `resident`
needs on a machine of a preset. No figure depends on how fast this computer is, and of all of them
less is better. `bench/gate.json` has the expected values and the tolerances with their reasons.

    python -m bench.gate             says what is worse or better; exit code 1 if anything is
    python -m bench.gate --update    writes what is found as expected
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from cotrain_compile import presets
from cotrain_compile.backends.inductor.lower import segments_of
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.files import load, save
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve

ROOT = Path(__file__).parents[1]
EXPECTED = ROOT / "bench" / "gate.json"
PROBLEMS = ROOT / "tests" / "problems"

Values = Mapping[str, float]
Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass(frozen=True)
class Question:
    """A saved step on the machine of a preset, with a share of what `resident` needs.

    Whether its plan may make values again is part of the question: the bound is another then.
    """

    job: str
    machine: str
    share: float
    recompute: bool = False

    @property
    def name(self) -> str:
        again = ", with values made again" if self.recompute else ""
        return f"{self.job} on {self.machine} at {self.share:.0%}{again}"


def mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Six wide layers: large parameters, little compute."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(6)])
    return _step(model, F.mse_loss), (torch.randn(2048, 4096), torch.randn(2048, 4096))


def gpt() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Four blocks of GPT-2's width: activations outweigh the parameters."""
    model = CharacterGPT(Shape(characters=4096, context=512, width=768, layers=4, heads=12))

    def loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    codes = torch.zeros(8, 512, dtype=torch.int64)
    return _step(model, loss), (codes, codes)


JOBS: Mapping[str, Build] = {"mlp": mlp, "gpt": gpt}
# Programs that are solved to their end in a few seconds: a time limit would tell of the computer.
QUESTIONS = (
    Question("mlp", "gh200", 0.7),
    Question("mlp", "gh200", 0.85),
    Question("gpt", "h100", 0.8),
    Question("gpt", "rtx4090", 0.5, recompute=True),
)
RULES = ("zero-offload", "coarse", "streamed", "fraction:auto")
UNLIMITED = dict.fromkeys(MEMORIES, 1 << 50)


def _step(model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


# What is found.


def captured(step: StepGraph) -> Values:
    """Counts of a captured step."""
    dataflow = extract(step)
    segments = segments_of(step, step, dataflow).segments.values()
    return {
        "nodes": len(step.module.graph.nodes),
        "ops": len(dataflow.ops),
        "segments": len(segments),
        "kinds_of_segments": len({segment.key for segment in segments}),
    }


def solved(question: Question, dataflow: Dataflow) -> Values:
    """Ratios and counts of the plan of `auto` for a step, and of the program behind it."""
    problem = problem_of(question, dataflow)
    # No limit that a busy computer could reach: what is found must not depend on it.
    plan = solve(problem, SolveSettings(work_limit=600.0, recompute=question.recompute))
    report = plan.report
    assert report is not None
    assert report.objective_s is not None
    # Neither hangs on a limit: a program solved to its gap, and a relaxation that was rounded.
    assert report.status in {"optimal", "rounded"}, report.status
    step_s, bound_s = plan.predicted.makespan_s, report.lower_bound_s
    rules_s = [value for name, value in report.simulated_s.items() if name in RULES]
    return {
        "step_to_bound": step_s / bound_s,
        "claim_to_bound": report.objective_s / bound_s,
        **({"step_to_best_rule": step_s / min(rules_s)} if rules_s else {}),
        "transfers": len(plan.transfers),
        "host_updates": len(plan.host_updates),
        "moved_to_resident_bytes": (plan.bytes_moved("offload") + plan.bytes_moved("prefetch"))
        / needed_bytes(problem),
    }


def problem_of(question: Question, dataflow: Dataflow) -> Problem:
    """The placement problem of a saved step within its share of the device and on any host."""
    problem = formulate(dataflow, presets.find(question.machine), UNLIMITED)
    budget_bytes = int(question.share * needed_bytes(problem))
    return problem.with_budget(Tier.DEVICE, budget_bytes)


def needed_bytes(problem: Problem) -> int:
    """Peak on the device with everything resident."""
    roomy = replace(problem, budgets=UNLIMITED)
    plan = schedule(roomy, resident(problem.dataflow))
    return plan.predicted.peak_bytes[Tier.DEVICE]


def found(
    jobs: Mapping[str, Build] = JOBS, questions: Sequence[Question] = QUESTIONS
) -> dict[str, Values]:
    """Everything the gate looks at, by job and by question."""
    values = {f"{name}, captured": captured(trace_graph(build)) for name, build in jobs.items()}
    for question in questions:
        dataflow = load(PROBLEMS / f"{question.job}.json", Dataflow)
        values[question.name] = solved(question, dataflow)
    return values


# What is said about it.


def complaints(expected: Mapping[str, Any], values: Mapping[str, Values]) -> list[str]:
    """One line for each figure outside its tolerance, worse or better; none if all is well.

    `expected` is the document of `bench/gate.json`. A figure that only one side has is a complaint.
    """
    lines = []
    for case in sorted({*expected["expected"], *values}):
        was, now = expected["expected"].get(case, {}), values.get(case, {})
        for name in sorted({*was, *now}):
            if name not in was or name not in now:
                side = "expected" if name not in now else "found"
                lines.append(f"{case}: {name} is only {side}")
                continue
            tolerance = expected["tolerances"][name]
            if abs(now[name] - was[name]) > tolerance["share"] * was[name]:
                lines.append(_complaint(case, name, was[name], now[name], tolerance))
    return lines


def _complaint(case: str, name: str, was: float, now: float, tolerance: Mapping[str, Any]) -> str:
    verdict = "WORSE" if now > was else "better"
    share = f"{now / was - 1:+.1%}" if was else f"{now - was:+g}"
    return (
        f"{case}: {name} is {verdict}: {now:.6g}, was {was:.6g} ({share}, "
        f"allowed {tolerance['share']:.1%}: {tolerance['why']})"
    )


def advice(lines: Sequence[str]) -> str:
    """How to go on when there are complaints."""
    worse = sum("WORSE" in line for line in lines)
    return (
        f"{worse} worse, {len(lines) - worse} better or changed. Mend what is worse; what is "
        "meant, or better, is accepted with `python -m bench.gate --update`."
    )


def update(path: Path, values: Mapping[str, Values]) -> None:
    """Write `values` as expected; the tolerances stay."""
    document = json.loads(path.read_text())
    document["expected"] = values
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare and say so, or write what is found as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="accept what is found")
    parser.add_argument("--trace", action="store_true", help="trace the saved steps again, too")
    given = parser.parse_args(arguments)
    if given.trace:
        for name, build in JOBS.items():
            save(extract(trace_graph(build)), PROBLEMS / f"{name}.json")
    values, console = found(), Console(soft_wrap=True)
    if given.update:
        update(EXPECTED, values)
        console.print(values)
        return
    lines = complaints(json.loads(EXPECTED.read_text()), values)
    for line in lines or ["as expected"]:
        console.print(line)
    if lines:
        sys.exit(advice(lines))


if __name__ == "__main__":
    main()
