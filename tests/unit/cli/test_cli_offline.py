"""The command line without torch: a saved step is solved, its plans are told and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cotrain_compile import files, presets
from cotrain_compile.cli.main import PANELS, app, main
from cotrain_compile.dataflow import Buffer, Dataflow, Role
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search.solve import SolveSettings
from cotrain_compile.placement.search.solve import solve as choose
from cotrain_compile.plan import (
    HostRegion,
    MovedOps,
    Placement,
    Plan,
    SolveReport,
    Timeline,
    Transfer,
    UpdateMode,
)
from cotrain_compile.viz.text.describe import describe_differences
from cotrain_compile.viz.text.summary import candidates, comparison, summary
from tests.support.dataflows import chain, mixed_precision_step

STEP = chain(3)
# Three weights, states and gradients of 16 KiB each, and activations of 2 KiB.
ROOMY, TIGHT, HOPELESS = "1MiB", "100KiB", "10KiB"
PLAN = Plan(
    fingerprint=STEP.fingerprint,
    machine="rtx4090",
    budgets={Tier.DEVICE: 1 << 20, Tier.HOST: 1 << 30},
    placement=Placement(
        policy="ilp",
        homes={
            **{f"w{i}": Tier.DEVICE for i in range(3)},
            "w1": Tier.HOST,
            **{f"m{i}": Tier.HOST for i in range(3)},
        },
        updates={
            "w0": UpdateMode.STREAMED,
            "w1": UpdateMode.HOST_STREAMED,
            "w2": UpdateMode.HOST,
        },
        offloaded=("h0", "w1"),
    ),
    tasks=(
        Transfer("fetch.w1", "prefetch", "w1", 16384, None, "forward_1"),
        Transfer("send.h0", "offload", "h0", 2048, "forward_1", "forward_2"),
        Transfer("again.w1", "prefetch", "w1", 16384, "loss", "backward_1"),
        Transfer("back.h0", "prefetch", "h0", 2048, "loss", "backward_1", ("send.h0",)),
        Transfer("fetch.m0", "prefetch", "m0", 16384, "loss", "update_0"),
        Transfer("write.m0", "offload", "m0", 16384, "update_0", None, (), "m0"),
        HostRegion("update.w1", "w1", ("update_1",), "backward_1", None),
    ),
    predicted=Timeline("predicted", (), {Tier.DEVICE: 1 << 19, Tier.HOST: 1 << 20}),
    moved=(MovedOps(("update_0",), "backward_0"),),
    report=SolveReport(
        solver="highs",
        status="time limit",
        seed=3,
        seconds=60.2,
        objective_s=0.352,
        bound_s=0.349,
        lower_bound_s=0.347,
        gap=0.0144,
        rounds=2,
        simulated_s={"zero-offload": 1.626, "ilp": 0.352},
    ),
)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    files.save(STEP, path)
    return path


def solve(step: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and words of `cotrain-compile solve`, which writes plan.json beside `step`."""
    output = str(step.with_name("plan.json"))
    common = ("solve", str(step), "--machine", "rtx4090", "-o", output)
    result = CliRunner().invoke(app, [*common, *arguments])
    if result.exception is not None and not isinstance(result.exception, PlacementError):
        raise result.exception
    return result.exit_code, result.output


def error_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["cotrain-compile", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    return capsys.readouterr().err


def test_solve_and_show_need_no_torch(step: Path) -> None:
    plan = step.with_name("plan.json")
    arguments = ["solve", str(step), "-o", str(plan), "--memory-budget", ROOMY]
    code = (
        "import sys; sys.modules['torch'] = None; from cotrain_compile.cli.main import app; "
        f"app({arguments!r}, standalone_mode=False); "
        f"app(['show', {str(plan)!r}], standalone_mode=False)"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("updates     3 ") == 2


def test_one_budget_gives_one_plan_and_what_the_simple_rules_would_take(step: Path) -> None:
    code, said = solve(step, "--memory-budget", TIGHT)
    assert code == 0
    plan = files.load(step.with_name("plan.json"), Plan)
    assert plan.budgets[Tier.DEVICE] == 100 * 1024
    assert plan.fingerprint == STEP.fingerprint
    assert said.count("below which no plan is\n") == 1
    heads = [line[:11].strip() for line in said.splitlines() if line[:1].isalpha()]
    assert heads[:4] == ["fits?", "how fast?", "why?", "what helps?"]
    assert said.count("tried  ") == 0
    rows = {line.partition("  ")[0]: line for line in said.splitlines() if line.strip()}
    assert "does not fit" in rows["everything on the device"]
    assert rows["all updates on the host, early"].endswith(("ms", "µs"))


def test_where_everything_fits_nothing_else_is_tried(step: Path) -> None:
    code, said = solve(step, "--memory-budget", ROOMY)
    assert code == 0
    assert "plan        everything on the device (resident) on rtx4090" in said
    assert "not needed" in said
    assert "zero-offload" not in said


def test_a_named_policy_is_not_compared(step: Path) -> None:
    code, said = solve(step, "--memory-budget", ROOMY, "--policy", "zero-offload")
    assert code == 0
    assert "plan        ZeRO-Offload's rule (zero-offload) on rtx4090" in said
    assert "does not fit" not in said


def test_several_budgets_give_a_file_each_and_one_table(step: Path) -> None:
    budgets = ("--memory-budget", ROOMY, "--memory-budget", "100 KiB", "--memory-budget", ROOMY)
    code, said = solve(step, *budgets)
    assert code == 0
    plans = [files.load(step.with_name(f"plan-{b}.json"), Plan) for b in (ROOMY, TIGHT)]
    assert [plan.budgets[Tier.DEVICE] for plan in plans] == [1 << 20, 100 << 10]
    (heading,) = (line for line in said.splitlines() if ROOMY in line and "100 KiB" in line)
    assert heading.split() == ["a", "step", "in", ROOMY, "100", "KiB"]
    assert "predicted" not in said


def test_more_memory_is_never_slower_in_one_call(tmp_path: Path) -> None:
    """Solved one by one, the second of these budgets takes 13 % longer than the first."""
    files.save(mixed_precision_step(2, params=500_000), tmp_path / "step.json")
    budgets = [f"{nbytes}B" for nbytes in (10_400_144, 12_500_115, 14_600_000)]
    code, _ = solve(tmp_path / "step.json", *(f"--memory-budget={b}" for b in reversed(budgets)))
    assert code == 0
    plans = [files.load(tmp_path / f"plan-{b}.json", Plan) for b in budgets]
    steps_s = [plan.predicted.makespan_s for plan in plans]
    assert steps_s == sorted(steps_s, reverse=True)


def test_updates_on_the_host_are_priced_by_how_they_will_run(step: Path) -> None:
    hosted = ("--memory-budget", ROOMY, "--policy", "zero-offload")
    code, said = solve(step, *hosted, "--host-kernels", "captured")
    assert code == 0
    assert 'updates on the host run op by op, as --host-kernels asks; "fused" is faster' in said
    assert "op by op" not in solve(step, *hosted)[1]


def test_the_gap_is_the_solvers(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(problem: Problem, settings: SolveSettings, **more: Any) -> Plan:
        seen.append(settings.gap)
        return choose(problem, settings, **more)

    monkeypatch.setattr("cotrain_compile.placement.search.solve.solve", look)
    solve(step, "--memory-budget", TIGHT, "--gap", "0.2")
    solve(step, "--memory-budget", TIGHT)
    assert seen == [0.2, SolveSettings.gap]


def test_a_hopeless_budget_does_not_keep_the_others_from_their_plans(step: Path) -> None:
    code, said = solve(step, "--memory-budget", HOPELESS, "--memory-budget", ROOMY)
    assert code == 1
    assert "none: " in said
    assert " short" in said
    assert step.with_name(f"plan-{ROOMY}.json").exists()
    assert not step.with_name(f"plan-{HOPELESS}.json").exists()


def test_a_step_that_fits_nowhere_is_one_line_of_error(
    step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = step.with_name("plan.json")
    arguments = ("solve", str(step), "-o", str(plan), "--memory-budget", HOPELESS)
    said = error_of(monkeypatch, capsys, *arguments)
    assert "short" in said
    assert said.count("\n") == 1
    assert not plan.exists()


@pytest.mark.parametrize("rule", ["auto", "zero-offload"])
def test_a_budget_of_a_few_bytes_was_meant_otherwise(
    rule: str, step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(step.with_name("plan.json"))
    for budget, asks in (("20", True), ("10KiB", False)):
        arguments = ("--memory-budget", budget, "--policy", rule)
        said = error_of(monkeypatch, capsys, "solve", str(step), "-o", plan, *arguments)
        assert ("but --memory-budget is 20 B (did you mean '20GiB'?): " in said) is asks


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--policy", "magic"), "option 'policy' is 'magic'"),
        (("--memory-budget", "lots"), "option 'memory_budget' is 'lots'"),
        (("--ranks", "8"), "a step of one process"),
        (("--time-limit", "-1"), "a number of seconds above 0"),
        (("--gap", "1.5"), "a fraction from 0 to below 1"),
        (("--machine", "abacus"), "no machine named 'abacus'"),
    ],
)
def test_a_wrong_setting_is_named_before_any_work(
    step: Path, arguments: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(OptionError, match=expected):
        solve(step, *arguments)


def test_what_is_no_choice_is_refused_with_the_choices(step: Path) -> None:
    result = CliRunner().invoke(app, ["solve", str(step), "-o", "unused", "--solver", "gurobi"])
    assert result.exit_code == 2
    assert "'highs'" in result.output
    assert "'cbc'" in result.output


def test_help_is_in_the_order_of_work_and_names_no_page_by_its_path() -> None:
    said = CliRunner().invoke(app, ["-h"]).output
    assert [said.index(f" {name} ") for name in PANELS] == sorted(
        said.index(f" {name} ") for name in PANELS
    )
    for name in PANELS:
        own = CliRunner().invoke(app, [name, "-h"])
        assert own.exit_code == 0
        assert f"cotrain-compile {name}" in own.output
        assert "docs/" not in own.output


def test_options_and_solver_have_the_same_defaults() -> None:
    options, settings = Options(), SolveSettings()
    assert (options.policy, options.solver, options.seed) == (
        settings.policy,
        settings.solver,
        settings.seed,
    )
    asked = (options.work_limit, options.time_limit, options.gap)
    assert asked == (settings.work_limit, settings.time_limit_s, settings.gap)


def test_the_summary_tells_modes_and_what_leaves() -> None:
    said = summary(PLAN)
    assert "updates     1 on the device with states from the host, 1 on the host with the" in said
    assert "weights     1 fetched for their uses, 1 of them more than once, 32.0 KiB up" in said
    assert "activations 1 leave the device between their uses, 2.0 KiB" in said
    assert "traffic     18.0 KiB down, 50.0 KiB up each step" in said


def test_with_the_step_the_summary_has_the_bytes_of_the_modes() -> None:
    said = summary(PLAN, STEP)
    # A parameter of 16 KiB with its momentum.
    assert "1 on the host with the weight (32.0 KiB), 1 on the host (32.0 KiB)" in said


def test_the_summary_reports_how_good_the_plan_is() -> None:
    said = summary(PLAN)
    assert "plan found in 60.20 s, " in said
    assert "highs: time limit, 2 rounds, seed 3" in said
    published = " (0 µs to 0 µs by published steps)"
    assert f"predicted   0 µs a step{published}, 1.4% above 347.0 ms, below which no plan" in said
    assert "tried       integer program 352.0 ms; ZeRO-Offload's rule 1.63 s" in said
    assert "tried" not in summary(PLAN, ranked=False)


def test_plans_side_by_side_name_what_does_not_fit() -> None:
    answers = (PLAN, PlacementError("too small", shortfall_bytes=3 << 30))
    rows = {name: cells for name, *cells in comparison(answers)}
    assert rows["plan"] == ["integer program", "none: 3.0 GiB short"]
    assert rows["status"] == ["time limit", ""]
    tried = {name: cells for name, *cells in candidates(answers, ("resident", "zero-offload"))}
    assert tried == {
        "everything on the device": ["does not fit", ""],
        "ZeRO-Offload's rule": ["1.63 s", ""],
        "integer program": ["352.0 ms", ""],
    }


def test_a_plan_and_its_own_step_do_not_differ() -> None:
    assert describe_differences(PLAN, STEP) == []


def renamed_momentum(step: Dataflow) -> Dataflow:
    extra = Buffer("m9", 16384, Role.OPTIMIZER_STATE, is_input=True, is_output=True)
    return replace(step, buffers=(*step.buffers, extra))


def wider_activations(step: Dataflow) -> Dataflow:
    larger = [replace(b, nbytes=4096) if b.name == "h0" else b for b in step.buffers]
    return replace(step, buffers=tuple(larger))


def another_loss(step: Dataflow) -> Dataflow:
    ops = [replace(op, name="nll") if op.name == "loss" else op for op in step.ops]
    return replace(step, ops=tuple(ops))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (chain(2), "parameters that only the plan updates: w2"),
        (chain(6), "parameters that only this step updates: w3, w4 and 1 more"),
        (renamed_momentum(STEP), "tensors that only this step keeps: m9"),
        (wider_activations(STEP), "other sizes: h0 (2,048 bytes in the plan, 4,096 here)"),
        (another_loss(STEP), "ops that only the plan has: loss"),
    ],
)
def test_a_plan_of_another_step_is_told_by_what_differs_first(
    other: Dataflow, expected: str
) -> None:
    assert describe_differences(PLAN, other)[0] == expected


def test_machines_as_json_are_the_files_that_other_commands_read() -> None:
    listed = json.loads(CliRunner().invoke(app, ["machines", "--json"]).stdout)
    assert [*listed] == ["machines"]
    assert [*listed["machines"]] == [*presets.PRESETS, presets.THIS_MACHINE]
    for name, machine in presets.PRESETS.items():
        assert files.from_json(json.dumps(listed["machines"][name]), Machine) == machine
    more = CliRunner().invoke(app, ["machines", "rtx4090", "--json", "--device-memory", "48GiB"])
    assert files.from_json(more.stdout, Machine).device.capacity_bytes == 48 << 30
