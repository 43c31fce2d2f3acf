"""A sweep: each point is a plan solved on its own, and says which budgets and sizes it is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.dataflow import Dataflow, Job, SizeExpressions
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Tier, default_budget
from cotrain_compile.placement.explain.sweep import (
    FITS,
    Case,
    Point,
    Sweep,
    carry_over,
    device_budgets,
    refuse_if_nothing_fits,
    try_case,
)
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Lane
from cotrain_compile.presets import find
from cotrain_compile.viz.sweep import draw_sweep, note, sweep_rows, sweep_table
from tests.support.dataflows import chain
from tests.support.random_problems import PLENTY, least_bytes, resident_bytes

STEP = chain(3, width=256)
MACHINE = find("rtx4090")
QUICK = SolveSettings("greedy")


def point(device_budget_bytes: int, step_s: float | None, **more: object) -> Point:
    made = Point("m", device_budget_bytes, PLENTY, {}, step_s, regime=Lane.H2D, policy="ilp")
    return replace(made, **more)  # type: ignore[arg-type]


def growing() -> Dataflow:
    """The same step with activations that grow with the batch."""
    activations = [b for b in STEP.buffers if b.name[0] in "hdx"]
    sizes = {b.name: f"{b.nbytes // 8}*batch" for b in activations}
    return replace(STEP, symbols={"batch": 8}, expressions=SizeExpressions(buffer_nbytes=sizes))


def test_a_point_is_what_solving_says() -> None:
    budgets = {Tier.DEVICE: 1 << 20, Tier.HOST: PLENTY}
    plan = solve(formulate(STEP, MACHINE, budgets), QUICK)
    found, _ = try_case(STEP, Case(MACHINE, budgets), QUICK)
    assert found.step_s == plan.predicted.makespan_s
    assert found.peak_bytes == plan.predicted.peak_bytes[Tier.DEVICE]
    assert found.traffic_bytes == plan.bytes_moved("offload") + plan.bytes_moved("prefetch") > 0
    assert found.regime in set(Lane)


def test_where_all_fits_nothing_limits_and_where_nothing_does_bytes_are_missing() -> None:
    roomy, _ = try_case(STEP, Case(MACHINE, {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}), QUICK)
    assert (roomy.regime, roomy.traffic_bytes) == (FITS, 0)
    tight, _ = try_case(STEP, Case(MACHINE, {Tier.DEVICE: 1000, Tier.HOST: PLENTY}), QUICK)
    assert tight.step_s is None
    assert tight.shortfall_bytes > 0


def test_what_is_missing_on_the_host_is_said_to_be_missing_there() -> None:
    budgets = {Tier.DEVICE: PLENTY, Tier.HOST: 0}
    missing, _ = try_case(STEP, Case(MACHINE, budgets), SolveSettings("zero-offload"))
    assert missing.shortfall_tier is Tier.HOST
    (row,) = sweep_rows(Sweep(STEP.fingerprint, (missing,)))
    assert row[6].endswith("missing on the host")
    with pytest.raises(PlacementError) as refusal:
        refuse_if_nothing_fits((missing,))
    assert refusal.value.tier is Tier.HOST


def test_a_size_is_that_of_the_step() -> None:
    """A batch of 64 needs eight times the activations of 8."""
    budgets = {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}
    peaks = [
        try_case(growing(), Case(MACHINE, budgets, {"batch": batch}), QUICK)[0].peak_bytes
        for batch in (8, 64)
    ]
    assert peaks[0] < peaks[1] < 8 * peaks[0]


def test_budgets_go_from_the_least_to_all_that_can_be_used() -> None:
    problem = formulate(STEP, MACHINE, {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY})
    budgets = device_budgets(STEP, MACHINE, PLENTY, 5)
    assert len(budgets) == 5
    assert budgets[0] == least_bytes(problem)
    assert budgets[-1] == resident_bytes(problem)
    small = MACHINE.but(device=replace(MACHINE.device, capacity_bytes=2 * budgets[2]))
    assert default_budget.of_machine(small) == budgets[2]
    assert device_budgets(STEP, small, PLENTY, 2) == (budgets[0], budgets[2])


def test_a_machine_that_is_too_small_for_the_step_is_refused() -> None:
    small = MACHINE.but(device=replace(MACHINE.device, capacity_bytes=1000))
    with pytest.raises(PlacementError):
        device_budgets(STEP, small, PLENTY, 3)


times = st.none() | st.floats(0.1, 10)


@given(st.lists(st.tuples(times, st.floats(0.01, 0.1)), min_size=1, max_size=6))
def test_more_memory_is_never_slower_and_bounds_never_rise(
    drawn: list[tuple[float | None, float]],
) -> None:
    points = [point(n + 1, s, lower_bound_s=bound) for n, (s, bound) in enumerate(drawn)]
    found = carry_over(points)
    assert [p.device_budget_bytes for p in found] == [p.device_budget_bytes for p in points]
    fitting = [p for p in found if p.step_s is not None]
    times_s = [p.step_s for p in fitting if p.step_s is not None]
    assert times_s == sorted(times_s, reverse=True)
    bounds = [p.lower_bound_s for p in fitting]
    assert bounds == sorted(bounds, reverse=True)
    for before, after in zip(points, found, strict=True):
        if before.step_s is not None:
            assert after.step_s is not None
            assert after.step_s <= before.step_s
            assert after.lower_bound_s >= before.lower_bound_s


def test_where_all_fits_the_plan_is_that_one_though_another_were_faster() -> None:
    fits = point(2, 3.0, regime=FITS)
    assert carry_over([point(1, 2.0), fits])[1].step_s == 3.0


def test_machines_and_sizes_are_not_mixed() -> None:
    points = [point(1, 1.0), point(2, 5.0, machine="n"), point(3, 6.0, sizes={"batch": 4})]
    assert [p.step_s for p in carry_over(points)] == [1.0, 5.0, 6.0]


def test_a_row_for_each_point_and_a_line_for_each_machine() -> None:
    missing = point(1, None, regime="", shortfall_bytes=2048)
    points = (missing, point(1 << 30, 2.0, lower_bound_s=1.6), point(2, 3.0, machine="n"))
    rows = list(sweep_rows(Sweep("f", points)))
    assert rows[0][6] == "does not fit: 2.0 KiB missing on the device"
    assert rows[1][2:7] == ("1.0 GiB", "2.00 s", "", "25.0%", "link up")
    (axes,) = draw_sweep(Sweep("f", points)).axes
    times_s = [
        np.asarray(line.get_ydata()).tolist() for line in axes.lines if line.get_linestyle() == "-"
    ]
    assert times_s == [[2.0], [3.0]]


def test_a_row_says_what_each_gib_has_bought_since_the_one_before() -> None:
    gib = 1 << 30
    same = (point(gib, 4.0), point(3 * gib, 3.0), point(4 * gib, 3.0))
    points = (*same, point(5 * gib, 1.0, machine="n"), point(6 * gib, 1.0, sizes={"batch": 4}))
    assert [row[4] for row in sweep_rows(Sweep("f", points))] == ["", "-500.0 ms", "", "", ""]


def test_a_point_at_which_the_solver_stopped_early_is_hollow_and_told() -> None:
    early = point(2, 5.0, stopped_early=True)
    slower, faster = carry_over([early, point(1, 3.0)])
    assert (slower.stopped_early, faster.step_s, faster.stopped_early) == (False, 3.0, True)
    found = Sweep("f", (slower, faster), Job("Net", {"x": (4, 8)}))
    (axes,) = (figure := draw_sweep(found)).axes
    filled = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "^"]
    assert [colour == "none" for colour in filled] == [False, True]
    assert figure.get_suptitle().startswith("Net, batch 4 × 8, on m (rates not measured), ")
    assert note(found.points).startswith("The solver stopped at its limit for 1 of 2 points")
    headings, rows = sweep_table(found)
    assert "sizes" not in headings
    assert [row[headings.index("solver")] for row in rows] == ["", "limit"]
    assert note((slower,)) == ""


def test_sizes_between_those_that_were_tried_are_not_drawn() -> None:
    points = [point(1, 1.0, sizes={"batch": 4}), point(1, 2.0, sizes={"batch": 8})]
    below = draw_sweep(Sweep("f", tuple(points))).axes[-1]
    assert all(
        np.size(line.get_xdata()) == 1 for line in below.lines if line.get_linestyle() == "-"
    )


def test_the_command_leaves_table_pictures_and_points(tmp_path: Path) -> None:
    files.save(growing(), tmp_path / "step.json")
    out = tmp_path / "out"
    step = ["sweep", str(tmp_path / "step.json"), "-o", str(out), "--machine", "rtx4090"]
    tried = ["--points", "2", "--size", "batch=8,16", "--policy", "greedy", "--jobs", "1"]
    run = CliRunner().invoke(app, [*step, *tried])
    assert run.exception is None, run.exception
    found = files.load(out / "sweep.json", Sweep)
    assert len(found.points) == 4
    assert [p.sizes for p in found.points] == [{}, {}, {"batch": 8}, {"batch": 16}]
    page = (out / "sweep.html").read_text(encoding="utf-8")
    for row in sweep_rows(found):
        assert row[3] in run.output
        assert f">{row[3]}</td>" in page
    assert "<svg" in page
    assert (out / "sweep.svg").read_text(encoding="utf-8").count("<svg") == 1
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_fits_the_command_says_what_is_missing(tmp_path: Path) -> None:
    """A host that is too small, as no device budget can help; what was tried is written."""
    files.save(STEP, tmp_path / "step.json")
    out = tmp_path / "out"
    step = ["sweep", str(tmp_path / "step.json"), "-o", str(out), "--machine", "rtx4090"]
    tried = [
        "--memory-budget",
        "100",
        "--memory-budget",
        "200",
        "--policy",
        "greedy",
        "--jobs",
        "1",
    ]
    run = CliRunner().invoke(app, [*step, *tried])
    found = files.load(out / "sweep.json", Sweep)
    assert isinstance(run.exception, PlacementError)
    assert run.exception.shortfall_bytes == found.points[-1].shortfall_bytes > 0
    assert "nearest is rtx4090 with 200 B on the device" in str(run.exception)
    assert found.points[-1].refusal in str(run.exception)
    assert run.exception.tier is found.points[-1].shortfall_tier
    (axes,) = draw_sweep(found).axes
    assert [text.get_text() for text in axes.texts] == ["nothing fits"]
    assert axes.get_legend() is None


@pytest.mark.parametrize("size", ["seq=8", "batch=many", "batch=0"])
def test_a_size_that_makes_no_sense_is_refused_before_anything_is_solved(
    tmp_path: Path, size: str
) -> None:
    files.save(growing(), tmp_path / "step.json")
    step, out = str(tmp_path / "step.json"), str(tmp_path / "out")
    run = CliRunner().invoke(app, ["sweep", step, "-o", out, "--size", size])
    assert isinstance(run.exception, OptionError)
