"""Kinds of layers as rows: what a plan does to a layer is a mark on it, with its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Lane, UpdateMode
from cotrain_compile.presets import find
from cotrain_compile.support.units import format_bytes
from cotrain_compile.viz.graph.rows import Sign, rows, rows_svg, rows_text, write_rows
from tests.support.dataflows import chain, random_dataflows
from tests.unit.viz.test_report import PLAN, STEP


def named(step: Dataflow) -> Dataflow:
    """`step`, a chain, with its weights and ops in numbered layers of a model."""

    def renamed(name: str) -> str:
        return f"net.{name[1:]}.weight" if name[0] == "w" and name[1:].isdigit() else name

    def of_op(op: Op) -> Op:
        number = op.name.rpartition("_")[2]
        module = f"net.{number}" if number.isdigit() else "head"
        reads, writes = tuple(map(renamed, op.reads)), tuple(map(renamed, op.writes))
        return replace(op, reads=reads, writes=writes, module=module)

    return replace(
        step,
        ops=tuple(map(of_op, step.ops)),
        buffers=tuple(replace(b, name=renamed(b.name)) for b in step.buffers),
        updates=tuple(replace(g, param=renamed(g.param)) for g in step.updates),
    )


@given(random_dataflows())
def test_every_op_is_counted_in_one_row(dataflow: Dataflow) -> None:
    found = rows(dataflow)
    assert sum(sum(row.ops.values()) for row in found) == len(dataflow.ops)
    of_params = sum(b.nbytes for b in dataflow.buffers if b.role is Role.PARAM)
    assert sum(row.param_bytes for row in found) <= of_params


def test_layers_that_are_alike_are_one_row_and_others_are_not() -> None:
    step = named(chain(32, width=64))
    layers, head = rows(step)
    assert (layers.name, layers.count, head.count) == ("net.0-31", 32, 1)
    assert layers.ops[Phase.FORWARD] == 32
    assert layers.param_bytes == 32 * 4 * 64 * 64
    other = tuple(replace(b, nbytes=8) if b.name == "net.7.weight" else b for b in step.buffers)
    found = rows(replace(step, buffers=other))
    assert [(row.name, row.count) for row in found] == [("net.0-31", 31), ("net.7", 1), ("head", 1)]


def test_what_a_plan_does_to_layers_is_marked_on_them_with_its_bytes() -> None:
    step = named(chain(8, width=256))
    needs = 8 * 3 * 4 * 256 * 256
    problem = formulate(step, find("rtx4090"), {Tier.DEVICE: needs // 2, Tier.HOST: 1 << 30})
    plan = solve(problem, SolveSettings(policy="zero-offload"))
    layers = rows(step, plan)[0]
    marks = {mark.sign: mark for mark in layers.marks}
    fetched = sum(task.nbytes for task in plan.transfers if task.direction == "prefetch")
    assert marks[Sign.FETCHED].nbytes == fetched
    on_host = [mode for mode in plan.placement.updates.values() if mode is not UpdateMode.RESIDENT]
    assert marks[Sign.ON_HOST].layers == len(on_host) == 8
    assert marks[Sign.ON_HOST].nbytes == 8 * 2 * 4 * 256 * 256
    told_s = sum(sum(row.seconds.values()) for row in rows(step, plan))
    assert told_s == pytest.approx(plan.predicted.busy_s(Lane.DEVICE))


def test_values_that_are_made_again_are_marked() -> None:
    step = named(chain(4, width=64, batch=512))
    placement = replace(PLAN.placement, recomputed=("h1", "h2"), updates={}, homes={})
    plan = replace(PLAN, placement=placement, tasks=(), moved=())
    (mark,) = rows(step, plan)[0].marks
    assert (mark.sign, mark.layers, mark.nbytes) == (Sign.AGAIN, 2, 2 * 4 * 64 * 512)


def test_text_and_svg_have_every_row_and_the_meaning_of_every_mark(tmp_path: Path) -> None:
    found = rows(STEP, PLAN)
    text, svg = rows_text(found), rows_svg(found)
    shown = [element.text or "" for element in ElementTree.fromstring(svg).iter()]
    for row in found:
        assert row.name in text
        for mark in row.marks:
            assert format_bytes(mark.nbytes) in text
            assert any(mark.sign.value in words for words in shown)
            assert mark.sign.value in text
    write_rows(found, tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text(encoding="utf-8") == svg
    with pytest.raises(OptionError, match=r"as \.txt or \.svg"):
        write_rows(found, tmp_path / "step.png")


def test_the_command_prints_and_writes_rows(tmp_path: Path) -> None:
    step, plan, out = (str(tmp_path / name) for name in ("step.json", "plan.json", "g.svg"))
    files.save(STEP, step)
    files.save(PLAN, plan)
    run = CliRunner().invoke(app, ["graph", step, "--plan", plan])
    assert run.exception is None, run.exception
    assert run.output == rows_text(rows(STEP, PLAN)) + "\n"
    run = CliRunner().invoke(app, ["graph", step, "--plan", plan, "-o", out])
    assert run.output.startswith(f"wrote {out}: 4 kinds of layers")
    assert Path(out).read_text(encoding="utf-8") == rows_svg(rows(STEP, PLAN))
