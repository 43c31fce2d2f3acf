"""What does a step take that does not fit? Simulated, with the host memory that its plan needs.

A few steps that people know, each within the device memory of a card and the host memory of a
computer one buys with it: the plan of `auto` with its bound, what the step would need with
everything on the device, and what the rule of ZeRO-Offload would take. With `--drive` the
host has no room for the states, but a drive. Plans are checked; nothing is run. These are the
figures of the README's table.

    python -W ignore -m bench.plans.first_screen -o bench/results/first_screen.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.plans.jobs import SHAPES, Shape, step_of
from bench.report import write_report
from cotrain_compile import presets
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.wear import wear
from cotrain_compile.support.units import Size, format_bytes, format_seconds

# A step, a machine, the device memory it may take and the host memory of the computer.
CASES = (
    ("GPT-2 124M, 32 × 1024", "rtx4090", "20GiB", "64GB"),
    ("Llama 1B, 8 × 2048", "rtx4090", "24GiB", "64GB"),
    ("Llama 7B, 4 × 2048", "rtx4090", "24GiB", "128GiB"),
    ("Llama 7B, 4 × 2048", "h100", "80GiB", "256GB"),
)
# The same of computers with a drive, which have a terabyte there.
WITH_DRIVE = (
    ("Llama 7B, 4 × 2048", "rtx4090", "22GiB", "62GB"),
    ("Llama 13B, 2 × 2048", "rtx4090", "22GiB", "64GB"),
)
PLENTY = 1 << 50


@dataclass(frozen=True)
class Case:
    """A planned step; without a plan that fits, `step_s` and what follows are None."""

    model: str
    machine: str
    tokens: int
    resident_bytes: int
    device_budget_bytes: int
    host_budget_bytes: int
    zero_offload_s: float | None
    step_s: float | None = None
    bound_s: float | None = None
    policy: str | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    wear: str | None = None
    refusal: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the planned step."""
        return self.tokens / self.step_s if self.step_s else None


def case(
    shape: Shape, name: str, device: str, host: str, folder: Path | None, disk: str = ""
) -> Case:
    """`shape` on machine `name`, by `auto` and by the rule."""
    machine = presets.find(name)
    sizes = {Tier.DEVICE: Size.parse(device), Tier.HOST: Size.parse(host)}
    sizes |= {Tier.DISK: Size.parse(disk)} if disk else {}
    budgets = {tier: size.nbytes or 0 for tier, size in sizes.items()}
    problem = formulate(step_of(shape, folder), machine, budgets)
    everything = problem.with_budget(Tier.DEVICE, PLENTY)
    known = Case(
        model=shape.name,
        machine=name,
        tokens=shape.batch * shape.length,
        resident_bytes=_peak(everything),
        device_budget_bytes=budgets[Tier.DEVICE],
        host_budget_bytes=budgets[Tier.HOST],
        zero_offload_s=_rule(problem),
    )
    try:
        plan = solve(problem)
    except PlacementError as error:
        return replace(known, refusal=str(error))
    check(problem, plan)
    return replace(
        known,
        step_s=plan.predicted.makespan_s,
        bound_s=plan.report.lower_bound_s if plan.report else None,
        policy=plan.placement.policy,
        device_bytes=plan.predicted.peak_bytes[Tier.DEVICE],
        host_bytes=plan.predicted.peak_bytes[Tier.HOST],
        disk_bytes=plan.predicted.peak_bytes.get(Tier.DISK),
        wear=worn.words if (worn := wear(problem, plan)) is not None else None,
    )


def _peak(problem: Problem) -> int:
    """What the device holds with everything on it."""
    plan = solve(problem, SolveSettings(policy="resident"))
    return plan.predicted.peak_bytes[Tier.DEVICE]


def _rule(problem: Problem) -> float | None:
    try:
        return solve(problem, SolveSettings(policy="zero-offload")).predicted.makespan_s
    except PlacementError:
        return None


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    lines = [
        "| step, machine | all on the device | device | host | step | tokens/s | above the bound "
        "| ZeRO-Offload |",
        "| --- " + "| ---: " * 7 + "|",
    ]
    for row in result["cases"]:
        each = Case(**row)
        needs = f"| {each.model}, {each.machine} | {format_bytes(each.resident_bytes)} "
        if each.step_s is None or each.device_bytes is None or each.host_bytes is None:
            lines.append(needs + "| - | - | no plan | - | - | - |")
            continue
        rule_s = each.zero_offload_s
        drive = f", and {format_bytes(each.disk_bytes)} on disk" if each.disk_bytes else ""
        cells = [
            f"{format_bytes(each.device_bytes)} of {format_bytes(each.device_budget_bytes)}",
            f"{format_bytes(each.host_bytes)} of {format_bytes(each.host_budget_bytes)}{drive}",
            format_seconds(each.step_s),
            f"{each.tokens_per_s:,.0f}",
            f"{100 * (each.step_s / each.bound_s - 1):.1f} %" if each.bound_s else "-",
            format_seconds(rule_s) if rule_s else "does not fit",
        ]
        lines.append(needs + "| " + " | ".join(cells) + " |")
    told = "Peaks of host memory count every copy to the end of the step: they are upper bounds."
    return "\n".join([*lines, "", told, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the cases, write them and print their table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=Path, help="folder for traced steps")
    parser.add_argument("--drive", action="store_true", help="those that need a drive alone")
    given = parser.parse_args(arguments)
    shapes = {shape.name: shape for shape in SHAPES}
    found = [
        case(shapes[name], machine, device, host, given.steps, "1TB" if given.drive else "")
        for name, machine, device, host in (WITH_DRIVE if given.drive else CASES)
    ]
    result = {"cases": [asdict(each) for each in found]}
    write_report(given.output, (__doc__ or "").splitlines()[0], result)
    print(table(result))


if __name__ == "__main__":
    main()
