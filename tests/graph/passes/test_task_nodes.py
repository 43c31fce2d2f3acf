"""What a task node says is known in one module, and what a task is called says nothing."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import cotrain_compile
from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.backends.lifecycle.deferred import wait_for_deferred
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.host import pieces
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.host.pieces import piecewise_tasks
from cotrain_compile.runtime.ops import TASKS
from cotrain_compile.runtime.task_nodes import view_of
from tests.support.captured_steps import captured, differences, place, reference
from tests.support.plans.overlapping_plans import overlapping
from tests.support.plans.random_plans import random_plan
from tests.support.plans.renamed_plans import renamed

# In bfloat16, so that the host casts; with these seeds they do all that a plan can do.
STEP, SEEDS = "autocast", (0, 1)


def plans() -> Iterator[Plan]:
    problem = captured(STEP).problem()
    for seed in SEEDS:
        rng = random.Random(seed)
        yield overlapping(problem, random_plan(problem, rng), rng)


def drawn_names(plan: Plan) -> dict[str, str]:
    rng = random.Random(0)
    return {task.name: f"task {rng.random()}" for task in plan.tasks}


def test_the_view_of_each_kind_of_task_node_writes_the_node_that_it_was_read_from() -> None:
    seen = set()
    for plan in plans():
        for node in run_passes(captured(STEP).step, plan).nodes:
            view = view_of(node)
            assert (view is not None) is (node.target in TASKS)
            if view is not None:
                assert view.call == (node.target, node.args)
                seen.add(node.target)
    assert seen == TASKS


def test_no_other_module_reads_or_writes_the_arguments_of_task_nodes() -> None:
    """Nobody else imports the ops by which it would know such nodes."""
    package = Path(cotrain_compile.__file__).parent
    folders = [package, package / "backends", package / "passes"]  # the last two are links
    importing = {
        path.relative_to(package).as_posix()
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "cotrain_compile.runtime.ops"
        if {"cotrain", "host_region"} & {name.name for name in node.names}
    }
    assert importing == {"runtime/task_nodes.py"}


@pytest.mark.usefixtures("watchdog", "one_thread")
@pytest.mark.parametrize("number", SEEDS)
def test_a_step_runs_to_the_same_bits_whatever_its_tasks_are_called(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, step = list(plans())[number], captured(STEP)
    names = drawn_names(plan)
    other = renamed(plan, names)
    check(step.problem(), other)
    timelines = [predict(place_plan(step.problem(), p)) for p in (plan, other)]
    assert timelines[0].makespan_s == timelines[1].makespan_s
    assert timelines[0].memory == timelines[1].memory

    monkeypatch.setattr(pieces, "PIECE_BYTES", 512)
    placed = [run_passes(step.step, p) for p in (plan, other)]
    assert find_race_in(placed[1]) is None
    first, second = (piecewise_tasks(graph, host_kernels(graph, "fused")) for graph in placed)
    assert second.keys() == {names[task] for task in first}
    assert {names[how.follows] for how in first.values() if how.follows} == {
        how.follows for how in second.values() if how.follows
    }

    assert first
    compiled = place(STEP, other)
    found = step.train(compiled)
    wait_for_deferred()
    assert differences(found, reference(STEP)) == []
    assert compiled.measured is not None
    updates = measured_costs([compiled.measured], other).host_update_s
    assert updates.keys() <= {region.param for region in plan.host_updates}
    assert bool(updates) is bool(plan.host_updates)
