"""Pictures of a step: every op and task is in one box, and arrows are the reads and waits of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.viz.graph.drawing import as_dot, as_text, write_picture
from cotrain_compile.viz.graph.picture import MOST_BOXES, BoxKind, Level, picture, series
from tests.support.dataflows import chain, random_dataflows
from tests.unit.viz.test_report import PLAN, STEP

LEVELS: tuple[Level, ...] = ("model", "layer", "op")


@given(random_dataflows(), st.sampled_from(LEVELS))
def test_every_op_is_in_one_box(dataflow: Dataflow, level: Level) -> None:
    drawn = picture(dataflow, level=level)
    assert sum(box.count for box in drawn.boxes) == len(dataflow.ops)
    names = [box.name for box in drawn.boxes]
    assert len(set(names)) == len(names)
    assert {a.source for a in drawn.arrows} | {a.target for a in drawn.arrows} <= set(names)


def test_an_arrow_is_what_an_op_reads_of_another() -> None:
    drawn = picture(chain(2), level="op")
    arrows = {(a.source, a.target): a for a in drawn.arrows}
    assert arrows["forward_0", "forward_1"].nbytes == 4 * 8 * 64
    assert arrows["forward_0", "forward_1"].kind is BoxKind.DATA
    assert ("forward_1", "forward_0") not in arrows


@pytest.mark.parametrize("level", LEVELS)
def test_a_placed_step_has_each_task_once_and_host_ops_in_their_region(level: Level) -> None:
    drawn = picture(STEP, PLAN, level=level)
    on_host = [box for box in drawn.boxes if box.tier is Tier.HOST]
    assert sum(box.count for box in on_host) == len(PLAN.tasks)
    moved = {op for region in PLAN.host_regions for op in region.ops}
    on_device = [box for box in drawn.boxes if box.tier is Tier.DEVICE]
    assert sum(box.count for box in on_device) == len(STEP.ops) - len(moved)
    assert sum(box.nbytes for box in on_host) == (
        PLAN.bytes_moved("offload") + PLAN.bytes_moved("prefetch")
    )


def test_what_waits_for_a_task_has_an_arrow_from_it() -> None:
    drawn = picture(STEP, PLAN, level="op")
    waits = {(a.source, a.target) for a in drawn.arrows if a.kind is BoxKind.WAIT}
    then = {(a.source, a.target) for a in drawn.arrows if a.kind is BoxKind.THEN}
    assert waits == {(t.name, t.wait_before) for t in PLAN.tasks if t.wait_before is not None}
    assert then == {(before, t.name) for t in PLAN.tasks for before in t.after}
    assert waits


def in_layers(count: int) -> Dataflow:
    """A chain whose passes are in modules `net.0.act`, `net.1.act`, ..."""
    step = chain(count, width=256)
    ops = [
        replace(op, module=f"net.{op.name.split('_')[1]}.act" if "ward_" in op.name else "")
        for op in step.ops
    ]
    return replace(step, ops=tuple(ops))


def test_an_opened_layer_shows_its_modules_and_its_neighbours_alone() -> None:
    drawn = picture(in_layers(4), layer="net.1")
    own = {box.name for box in drawn.boxes if box.layers == ("net.1",)}
    assert "forward net.1.act" in own
    others = {box.name for box in drawn.boxes} - own
    assert "forward net.0" in others
    assert "forward net.3" not in others
    as_ops = picture(in_layers(4), layer="net.1", level="op")
    assert "forward_1" in {box.name for box in as_ops.boxes}
    with pytest.raises(OptionError, match=r"no layer 'net\.9'; it has net\.0"):
        picture(in_layers(4), layer="net.9")


def test_layers_that_differ_by_a_number_are_one_box_where_there_are_many() -> None:
    few, many = picture(in_layers(3)), picture(in_layers(40))
    assert {"forward net.0", "forward net.1"} <= {box.name for box in few.boxes}
    assert len(many.boxes) <= MOST_BOXES
    (folded,) = (box for box in many.boxes if box.name == "forward net.0-39")
    assert folded.layers == tuple(f"net.{number}" for number in range(40))
    assert len(picture(in_layers(40), most_boxes=1000).boxes) > MOST_BOXES
    assert series(["a.0", "a.10", "b.3", "head"]) == {"a.0": "a.0-10", "a.10": "a.0-10"}


def test_text_and_dot_name_every_box() -> None:
    drawn = picture(STEP, PLAN)
    text, dot = as_text(drawn), as_dot(drawn)
    for box in drawn.boxes:
        assert f"{box.name}  ({box.group}, {box.count} " in text
        assert f'"{box.name}" [label=' in dot
    assert dot.count(" -> ") == len(drawn.arrows)


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz (apt install graphviz)")
def test_an_svg_has_a_shape_for_every_box(tmp_path: Path) -> None:
    drawn = picture(STEP, PLAN)
    write_picture(drawn, tmp_path / "step.svg")
    nodes = ElementTree.parse(tmp_path / "step.svg").findall(".//*[@class='node']")
    assert len(nodes) == len(drawn.boxes)


def test_without_graphviz_an_svg_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(OptionError, match=r"install graphviz, or write a \.dot file"):
        write_picture(picture(STEP), tmp_path / "step.svg")
    with pytest.raises(OptionError, match=r"a graph is written as \.txt, \.dot, \.svg"):
        write_picture(picture(STEP), tmp_path / "step.pdf")


def test_the_command_draws_a_step_and_a_placed_step(tmp_path: Path) -> None:
    step, plan, out = (str(tmp_path / name) for name in ("step.json", "plan.json", "g.dot"))
    files.save(STEP, step)
    files.save(PLAN, plan)
    run = CliRunner().invoke(app, ["graph", step, "--level", "op"])
    assert run.exception is None, run.exception
    assert run.output == as_text(picture(STEP, level="op")) + "\n"
    run = CliRunner().invoke(app, ["graph", step, "--plan", plan, "-o", out])
    assert run.exception is None, run.exception
    assert Path(out).read_text(encoding="utf-8") == as_dot(picture(STEP, PLAN))
