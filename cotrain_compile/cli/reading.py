"""Reading: a saved plan with the step and the machine that its costs come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotrain_compile import files, presets
from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError, PlanError
from cotrain_compile.machine import Machine
from cotrain_compile.plan import Lane, Plan, Timeline
from cotrain_compile.viz.text.describe import describe_differences

if TYPE_CHECKING:
    from cotrain_compile.placement.problem import Problem

Step = Annotated[
    Path | None, typer.Option(help="The step.json of the plan; default: the one in its folder.")
]
PlanMachine = Annotated[
    str | None,
    typer.Option(
        help="The machine the plan was made for; default: the one beside it, or named in it."
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="The profile.json the plan was made with; default: the one beside it, if needed."
    ),
]

# Simulated again on the machine it was made for, a plan takes what it says, up to rounding.
ROUNDING = 1e-6


def read_step(plan: Plan, file: Path, step: Path | None) -> Dataflow:
    """The step of `plan`, from `step` or from the step.json beside `file`.

    Raises `OptionError` when there is none, `PlanError` when it is another step.
    """
    path = step or file.with_name("step.json")
    if not path.is_file():
        raise OptionError(
            f"a plan alone has no costs, and there is no {path}; give the step that {file} was "
            "made for with --step step.json"
        )
    dataflow = files.load(path, Dataflow)
    if dataflow.fingerprint != plan.fingerprint:
        raise PlanError(
            f"plan {file} was made for another step ({plan.fingerprint}) than {path} "
            f"({dataflow.fingerprint}); give the one it was made for with --step"
        )
    _refuse_other_names(plan, file, dataflow, path)
    return dataflow


def step_beside(file: Path, plan: Plan) -> Dataflow | None:
    """The step of `plan` where it is in the step.json beside `file`, as in a dump."""
    beside = file.with_name("step.json")
    if not beside.is_file():
        return None
    dataflow = files.load(beside, Dataflow)
    if dataflow.fingerprint != plan.fingerprint:
        return None
    _refuse_other_names(plan, file, dataflow, beside)
    return dataflow


def _refuse_other_names(plan: Plan, file: Path, dataflow: Dataflow, step: Path) -> None:
    """Raise `PlanError` where a plan says that it is for a step, and names what that has not."""
    if differences := describe_differences(plan, dataflow):
        raise PlanError(
            f"plan {file} has the fingerprint of {step}, but not its names: "
            f"{'; '.join(differences[:3])}; one of the two was changed: make them again"
        )


def read_problem(
    plan: Plan, file: Path, step: Path | None, machine: str | None, profile: Path | None
) -> Problem:
    """What `plan`, read from `file`, was made for; raises as `read_step` does.

    Raises `PlanError` when the plan is unsound, or the costs are others than those that it was
    made with.
    """
    from cotrain_compile.placement.check.check import check

    dataflow = read_step(plan, file, step)
    target = presets.find(machine) if machine else machine_of(plan, file)
    told_s: list[float] = []
    for problem in _problems(dataflow, target, plan, _profiles(file, profile)):
        if not told_s:
            check(problem, plan)
        again = _predicted(problem, plan)
        if _is_alike(again, plan.predicted):
            return problem
        told_s.append(again.makespan_s)
    raise PlanError(
        f"plan {file} says {plan.predicted.makespan_s:.6g} s a step, but simulated on "
        f"{target.name} it takes {told_s[0]:.6g} s: it was made with other "
        "costs; give its --machine machine.json, and its --profile where it had one"
    )


def _problems(
    dataflow: Dataflow, machine: Machine, plan: Plan, profiles: Iterable[CostTable | None]
) -> Iterator[Problem]:
    """All that `plan` may have been made for: it does not say with which costs.

    Nor whether updates on the host were to run as captured, by the option `host_kernels`, nor
    whether its ops run in compiled code, by `lowering`.
    """
    from cotrain_compile.placement.problem import formulate

    for costs in profiles:
        for captured, compiled in product((False, True), (None, False)):
            yield formulate(
                dataflow, machine, plan.budgets, costs, captured=captured, compiled=compiled
            )


def _profiles(file: Path, given: Path | None) -> Iterator[CostTable | None]:
    """The profile that is `given`; else none, then the one that a dump leaves beside a plan."""
    if given is not None:
        yield files.load(given, CostTable)
        return
    yield None
    beside = file.with_name("profile.json")
    if beside.is_file():
        yield files.load(beside, CostTable)


def machine_of(plan: Plan, file: Path) -> Machine:
    """The machine that `plan`, read from `file`, names: of a dump the one beside it."""
    beside = file.with_name("machine.json")
    if beside.is_file() and (found := presets.find(str(beside))).name == plan.machine:
        return found
    return presets.find(plan.machine)


def _predicted(problem: Problem, plan: Plan) -> Timeline:
    from cotrain_compile.placement.placed import place_plan
    from cotrain_compile.placement.simulate.predict import predict

    return predict(place_plan(problem, plan))


def _is_alike(again: Timeline, planned: Timeline) -> bool:
    """Whether both take as long, and so do the host's updates and the device's ops, which may hide
    one another.
    """
    pairs = (
        (again.makespan_s, planned.makespan_s),
        *((again.busy_s(lane), planned.busy_s(lane)) for lane in (Lane.DEVICE, Lane.HOST)),
    )
    return all(abs(a - b) <= ROUNDING * b for a, b in pairs)
