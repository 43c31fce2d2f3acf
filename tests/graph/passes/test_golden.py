"""Golden texts: what the compiler makes of one small step, short enough to read in a review.

`captured.txt` is the step, `dataflow.txt` the same as data; every other file is what one pass
changes in it. A change of what the compiler does is a change of these files: look at it, then write
it with `pytest --update-golden`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.dataflow_text import text
from tests.support.plan_text import lines as task_lines
from tests.support.plans.random_plans import last_moment_plan
from tests.support.step_text import lines

Golden = Callable[[str, str], None]

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the texts are those of torch 2.13's traces"
)


def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.zeros(2, 64),)


@functools.cache
def captured() -> StepGraph:
    return trace_graph(build)


@functools.cache
def problem() -> Problem:
    machine = find("rtx4090")
    return formulate(extract(captured()), machine, Options().budgets(machine))


def scheduled(policy: str) -> Plan:
    return schedule(problem(), rule(policy)(problem().dataflow))


def everything_offloaded() -> Plan:
    """Every state, weight and activation leaves the device that may, and is fetched at the last."""
    return last_moment_plan(problem(), rule("streamed")(problem().dataflow), offloaded=True)


PLANS: dict[str, Callable[[], Plan]] = {
    "zero-offload": lambda: scheduled("zero-offload"),
    "streamed": lambda: scheduled("streamed"),
    "everything-offloaded": everything_offloaded,
}


def changes(plan: Plan) -> Iterator[tuple[str, str]]:
    """What each pass that does anything changes, by its name."""
    found: list[tuple[str, str]] = []

    def look(name: str, before: StepGraph, after: StepGraph) -> None:
        diff = list(difflib.unified_diff(lines(before), lines(after), n=1, lineterm=""))
        if diff:
            # Without the names of files, of which there are none.
            found.append((name, "\n".join(diff[2:]) + "\n"))

    run_passes(captured(), plan, look)
    yield from found


def test_the_captured_step(golden: Golden) -> None:
    golden("captured.txt", "\n".join(lines(captured())) + "\n")


def test_the_dataflow_of_the_step(golden: Golden) -> None:
    golden("dataflow.txt", text(problem().dataflow))


@pytest.mark.parametrize("name", PLANS)
def test_what_each_pass_changes(name: str, golden: Golden) -> None:
    seen = dict(changes(PLANS[name]()))
    golden(f"{name}.passes.txt", "".join(f"{n}\n\n{diff}\n" for n, diff in seen.items()))


@pytest.mark.parametrize("name", PLANS)
def test_the_tasks_of_a_plan(name: str, golden: Golden) -> None:
    plan = PLANS[name]()
    golden(f"{name}.plan.txt", "\n".join(task_lines(plan.tasks, plan.moved)) + "\n")
