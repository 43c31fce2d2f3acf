"""What is it worth to make values again? Simulated steps of plans with and without it.

For every step, machine and budget: the plan that makes nothing again; the step with every layer or
every other one made again, and with one level of values in all layers, and the rest placed by the
integer program; the same under the user's own checkpoints of layers, traced so, for some steps;
ProTrain's blocks, each swapped, made again or kept, over simple rules for the states, the best of a
grid; and `auto`, which chooses; with the certified bound of all of them. Convolutional nets stand
beside the table of MONeT (Shah et al., ICLR 2021), with the host a link away that nothing is worth
sending over, and once more over the link that POFO (Beaumont et al., NeurIPS 2021) has, where what
moves is to spare a third of what making again costs. Every plan is checked.
Nothing is run: times are simulated, op by op.

    python -m bench.plans.recompute -o bench/results/recompute.json
    python -m bench.plans.recompute -o recompute.json --steps traced --only "GPT-2"
    python -m bench.plans.recompute -o bench/results/recompute.json --part alone --merge
    python -m bench.plans.recompute -o bench/results/recompute.json --part cells --merge --auto
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from bench.plans import models
from bench.plans.jobs import EXAMPLES, SHAPES, step_of, with_batch
from bench.plans.protrain import interleaved
from bench.plans.stopwatch import stopwatch
from bench.report import runs_before, write_report
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.files import load, save
from cotrain_compile.jobs import load_job
from cotrain_compile.machine import MEMORIES, Link, Machine, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.regions import every_layer, every_other_layer, regions_of
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.search.variants import Levels
from cotrain_compile.plan import Lane, Plan
from cotrain_compile.support.units import Size

HOST_BYTES = 1 << 40
# Steps by the name of their shape, with the machines and the budgets to plan for.
CELLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("GPT-2 124M, 32 × 1024", "rtx4090", ("20GiB", "24GiB")),
    ("Llama 1B, 2 × 2048", "rtx4090", ("9.7GiB", "14GiB", "24GiB")),
    ("Llama 7B, 4 × 2048", "h100", ("30.53GiB",)),
    ("Llama 1B, 2 × 2048", "gh200", ("10.45GiB",)),
    ("U-Net, 16 × 512²", "rtx4090", ("8GiB",)),
    ("Experts 0.5B, 8 × 1024", "rtx4090", ("8GiB",)),
    ("ViT-L, 128 × 224²", "rtx4090", ("16GiB",)),
    ("Llama 1B, 8 × 2048", "rtx4090", ("24GiB",)),
    ("Llama 7B, 4 × 2048", "rtx4090", ("13.68GiB", "24GiB")),
    ("Llama 7B, 4 × 2048", "h100", ("80GiB",)),
    ("GPT-2 124M, 32 × 1024", "h100", ("20GiB",)),
)
# Steps that are planned with a host that nothing can be sent to in time, as in MONeT's tables, and
# with POFO's, in shares of the memory in which everything fits, with the overhead that MONeT has.
# Where no plan is in MONeT's share, others are planned for, for which nothing is published.
ALONE: tuple[tuple[str, tuple[tuple[float, float | None], ...]], ...] = (
    ("ResNet-50, 184 × 224²", ((10.01 / 15.06, 0.032), (6.0 / 15.06, 0.093))),
    ("VGG-16, 176 × 224²", ((0.6, None), (5.51 / 14.12, 0.091))),
    ("U-Net, 16 × 512²", ((0.6, None), (0.5, None), (5.01 / 14.32, 0.115))),
)
ALONE_ON = "v100-dgx2"
SLOWEST, POFOS = 1e6, 12e9  # bytes a second
# A plan that takes so many times as long sends values over the slowest link: it is none.
LONGEST = 2.0
# Steps of `bench.plans.models`.
OWN = {
    "U-Net, 16 × 512²": models.unet,
    "Experts 0.5B, 8 × 1024": models.mixture,
    "ViT-L, 128 × 224²": models.vit_l,
    "ResNet-50, 184 × 224²": models.resnet50,
    "VGG-16, 176 × 224²": models.vgg16,
}
# Steps that are traced with the user's own checkpoints, too: of how many layers each.
USERS = {
    "GPT-2 124M, 32 × 1024": (1, 2),
    "Llama 1B, 2 × 2048": (1, 2),
}
# Seconds for a plan: each way gets as much.
LIMIT_S = 20.0
RULES = {"every layer": every_layer, "every other layer": every_other_layer}
# Shares of the blocks that are swapped, and made again, and where the states are meanwhile.
SHARES = (0, 1 / 3, 2 / 3, 1)
STATES = ("resident", "coarse", "streamed")


@dataclass(frozen=True)
class Cell:
    """One step on one machine in one budget; `steps_s` by way, None where it does not fit.

    `recomputed_bytes` are made again by `auto` in `redo_s` of the device. To find its plan took
    `solve_s`, and `processor_s` of all processors by their own time.
    """

    model: str
    machine: str
    budget_bytes: int
    steps_s: Mapping[str, float | None]
    bound_s: float
    policy: str
    recomputed_bytes: int
    redo_s: float
    solve_s: float
    processor_s: float | None = None


@dataclass(frozen=True)
class Against:
    """What `auto` takes longer in a `share` of the memory in which everything fits, and what is
    `published`, on another card and with other costs: to be compared in shape. None: no plan.
    `with_link` is that with a host that values can be sent to."""

    model: str
    share: float
    overhead: float | None
    with_link: float | None
    published: float | None


def planned(problem: Problem, settings: SolveSettings) -> Plan | None:
    """The checked plan, None where nothing fits."""
    try:
        plan = solve(problem, settings)
    except (PlacementError, PlanError):
        return None
    check(problem, plan)
    return plan


def step_s(plan: Plan | None) -> float | None:
    """The simulated step of a plan, if there is one."""
    return None if plan is None else plan.predicted.makespan_s


def cell(
    model: str, problem: Problem, users: Mapping[str, Dataflow], settings: SolveSettings
) -> Cell:
    """All ways to plan `problem`; `users` are the same step under the user's own checkpoints."""
    steps: dict[str, float | None] = {}
    without = replace(settings, recompute=False)
    steps["nothing"] = step_s(planned(problem, without))
    for name, choose in RULES.items():
        chosen = choose(problem.dataflow, recomputable(problem.dataflow))
        rewritten = problem.recomputing(sorted(chosen)).as_its_own_step()
        steps[name] = step_s(planned(rewritten, without))
    for name, dataflow in users.items():
        own = formulate(dataflow, problem.machine, problem.budgets)
        steps[name] = step_s(planned(own, without))
    steps["one level"] = one_level_s(problem, settings)
    steps["ProTrain's blocks"] = blocks_s(problem)
    return of_auto(model, problem, steps, settings)


def of_auto(
    model: str, problem: Problem, others: Mapping[str, float | None], settings: SolveSettings
) -> Cell:
    """What `auto` finds, beside what is known of other ways."""
    with stopwatch() as took:
        plan = planned(problem, settings)
    nbytes, redo_s = made_again(problem.dataflow, plan)
    return Cell(
        model,
        problem.machine.name,
        problem.budgets[Tier.DEVICE],
        {**others, "auto": step_s(plan)},
        plan.report.lower_bound_s if plan is not None and plan.report is not None else 0.0,
        plan.placement.policy if plan is not None else "none",
        nbytes,
        redo_s,
        took.wall_s,
        took.processor_s,
    )


def one_level_s(problem: Problem, settings: SolveSettings) -> float | None:
    """The fastest step with one whole level in all layers, by the relaxation rounded."""
    levels, tried = Levels(problem), Attempts(problem, settings, lambda stage: None)
    for number in range(1, levels.count + 1):
        tried.try_level(levels.variant(number))
    return None if tried.found.fastest is None else tried.found.fastest.step_s


def blocks_s(problem: Problem) -> float | None:
    """The fastest step of ProTrain's blocks that fits; None where none does."""
    dataflow, may = problem.dataflow, recomputable(problem.dataflow)
    count = len(regions_of(dataflow, may))
    found: list[float] = []
    for swapped, again in product((round(share * count) for share in SHARES), repeat=2):
        if swapped + again > count:
            continue
        choice = interleaved(dataflow, may, swapped, again)
        for states in STATES:
            with suppress(PlacementError):
                placement = rule(states)(dataflow)
                made_again, offloaded = tuple(choice.recomputed), tuple(choice.offloaded)
                plan = schedule(
                    problem, replace(placement, recomputed=made_again, offloaded=offloaded)
                )
                check(problem, plan)
                found.append(plan.predicted.makespan_s)
    return min(found, default=None)


def made_again(dataflow: Dataflow, plan: Plan | None) -> tuple[int, float]:
    """Bytes that a plan makes again, and the seconds of the device that this takes."""
    if plan is None:
        return 0, 0.0
    names = plan.placement.recomputed
    again = recomputed_ops(dataflow, names, plan.placement.recomputed_apart)
    spans = (span for span in plan.predicted.lane(Lane.DEVICE) if span.name in again)
    nbytes = sum(dataflow.buffer[name].nbytes for name in names)
    return nbytes, sum(span.end_s - span.start_s for span in spans)


def traced(name: str, folder: Path | None, every: int = 0) -> Dataflow:
    """The step called `name`, with `every` so many layers under the user's checkpoints.

    Read from `folder` where it is, else traced and kept there.
    """
    shapes = {shape.name: shape for shape in SHAPES}
    if name in OWN:
        build, file_name = OWN[name], f"{OWN[name].__name__}.json"
    elif every:
        shape = shapes[name]
        job = with_batch(load_job(f"{EXAMPLES}/{shape.job}"), shape.batch)
        build, file_name = models.checkpointed(job, every), f"users_{every}_{shape.file_name}"
    else:
        return step_of(shapes[name], folder)
    if folder is not None and (folder / file_name).exists():
        return load(folder / file_name, Dataflow)
    dataflow = trace(build)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        save(dataflow, folder / file_name)
    return dataflow


# What is known of other ways, by step, machine and budget.
Others = Mapping[tuple[str, str, int], Mapping[str, float | None]]


def cells(
    only: str, folder: Path | None, settings: SolveSettings, others: Others | None = None
) -> Iterator[Cell]:
    """Those whose steps have the words `only` in their names: `auto` alone, with `others` given."""
    for name, machine, budgets in CELLS:
        if only not in name:
            continue
        step = traced(name, folder)
        users = {
            f"user's, every {'layer' if n == 1 else 'other layer'}": traced(name, folder, n)
            for n in (USERS.get(name, ()) if others is None else ())
        }
        for budget in budgets:
            target = presets.find(machine)
            nbytes = Size.parse(budget).of(target.device.capacity_bytes)
            allowed = {Tier.DEVICE: nbytes, Tier.HOST: HOST_BYTES}
            problem = formulate(step, target, allowed)
            if others is None:
                yield cell(name, problem, users, settings)
            else:
                yield of_auto(name, problem, others[name, machine, nbytes], settings)


def alone(only: str, folder: Path | None, settings: SolveSettings) -> Iterator[Against]:
    """Nets beside MONeT's table, and with POFO's link."""
    found = presets.find(ALONE_ON)
    for name, shares in ALONE:
        if only not in name:
            continue
        step = traced(name, folder)
        for share, published in shares:
            without, with_link = (
                overhead(step, found.but(h2d=Link(rate), d2h=Link(rate)), share, settings)
                for rate in (SLOWEST, POFOS)
            )
            yield Against(name, share, without, with_link, published)


def overhead(
    step: Dataflow, machine: Machine, share: float, settings: SolveSettings
) -> float | None:
    """What the step takes longer in that `share` of its memory; None where there is no plan."""
    free = formulate(step, machine, dict.fromkeys(MEMORIES, HOST_BYTES))
    everything = schedule(free, rule("resident")(step)).predicted
    nbytes = int(share * everything.peak_bytes[Tier.DEVICE])
    tight = free.with_budget(Tier.DEVICE, nbytes)
    plan = planned(tight, settings)
    longer = math.inf if plan is None else plan.predicted.makespan_s / everything.makespan_s
    return longer - 1 if longer < LONGEST else None


def merged(
    found: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]], key: Sequence[str]
) -> list[Mapping[str, Any]]:
    """`kept` with the rows of `found` in the places of those of the same `key`, or behind them."""
    rows = {tuple(row[name] for name in key): row for row in (*kept, *found)}
    return list(rows.values())


def main() -> None:
    """Plan every cell and write what came of it, as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=Path, help="a folder to keep traced steps in")
    parser.add_argument("--only", default="", help="words in the names of steps")
    parser.add_argument("--part", choices=("cells", "alone"), help="one of the tables alone")
    parser.add_argument("--merge", action="store_true", help="keep the output's other rows")
    parser.add_argument("--auto", action="store_true", help="keep its other columns, too")
    parser.add_argument("--minutes", type=float, default=math.inf, help="when to end at the latest")
    parser.add_argument("--work-limit", type=float, default=LIMIT_S, help="seconds for a plan")
    asked = parser.parse_args()
    began, planned_cells, beside = time.monotonic(), list[Any](), list[Any]()
    kept: Mapping[str, Any] = {}
    others: list[dict[str, str]] = []
    if asked.merge and asked.output.exists():
        kept = json.loads(asked.output.read_text())["result"]
        others = runs_before(asked.output)
    settings = SolveSettings(work_limit=asked.work_limit)
    found_before = {
        (row["model"], row["machine"], row["budget_bytes"]): row["steps_s"]
        for row in kept.get("cells", ())
    }
    ways: dict[str, Iterator[Cell | Against]] = {
        "cells": cells(asked.only, asked.steps, settings, found_before if asked.auto else None),
        "alone": alone(asked.only, asked.steps, settings),
    }
    for found in chain.from_iterable(ways[part] for part in ways if asked.part in (None, part)):
        (planned_cells if isinstance(found, Cell) else beside).append(asdict(found))
        print(found, flush=True)
        result = {
            "cells": merged(
                planned_cells, kept.get("cells", ()), ("model", "machine", "budget_bytes")
            ),
            "alone": sorted(
                merged(beside, kept.get("alone", ()), ("model", "share")),
                key=lambda row: (row["model"], -row["share"]),
            ),
            "others": others,  # by which what is kept was found
        }
        write_report(asked.output, "What is it worth to make values again?", result)
        if time.monotonic() - began > 60 * asked.minutes:
            break


if __name__ == "__main__":
    main()
