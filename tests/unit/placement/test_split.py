"""Regions in parts, as data: what a part has, what is collected, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow, Op, Phase
from cotrain_compile.dataflow.regions import Collected, Region, RegionOp, Window, part_rows
from cotrain_compile.errors import PlanError
from cotrain_compile.files import from_json, to_json
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.split import EMPTY, ZEROS, _apart, split_regions
from cotrain_compile.presets import find
from tests.support.dataflows import chain

BATCH, WIDTH = 64, 16
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def head() -> Dataflow:
    """A chain whose last layer, loss and the gradients of both may run in parts of the batch."""
    dataflow = chain(3, width=WIDTH, batch=BATCH)
    ops = (
        RegionOp("forward_2", whole_bytes=WEIGHT_BYTES),
        RegionOp("loss"),
        RegionOp("backward_2", whole_bytes=2 * WEIGHT_BYTES),
    )
    collected = (
        Collected("loss", "loss", "loss", is_sum=True),
        Collected("backward_2", "backward_2", "g2", is_sum=True),
        Collected("item", "backward_2", "d1", is_sum=False),
    )
    window = Window(ops, collected, joined=True)
    position = dataflow.position["backward_2"] + 1
    item = Op("item", "getitem", Phase.BACKWARD, ("d1",), ())
    view = RegionOp("item")
    return replace(
        dataflow,
        ops=(*dataflow.ops[:position], item, *dataflow.ops[position:]),
        regions=(
            Region("loss", "loss", BATCH, (replace(window, ops=(*ops, view)),), ("h2", "d2", "d1")),
        ),
    )


def two_regions() -> Dataflow:
    """The same, and the forward of the layer before may run in parts, too."""
    dataflow = head()
    forward = Window(
        (RegionOp("forward_1", whole_bytes=WEIGHT_BYTES),),
        (Collected("forward_1", "forward_1", "h1", is_sum=False),),
    )
    layer = Region("layer", "mlp", BATCH, (forward,), ("h1",))
    return replace(dataflow, regions=(*dataflow.regions, layer))


@pytest.mark.parametrize(("layer", "loss"), [(2, 2), (3, 4), (64, 5)])
def test_regions_cut_at_once_are_those_cut_one_after_the_other(layer: int, loss: int) -> None:
    dataflow = two_regions()
    once = split_regions(dataflow, {"layer": layer, "loss": loss})
    once.verify_read()
    assert not once.regions
    for first, second in (("layer", "loss"), ("loss", "layer")):
        parts = {"layer": layer, "loss": loss}
        half = split_regions(dataflow, {first: parts[first]})
        assert [region.name for region in half.regions] == [second]
        whole = split_regions(half, {second: parts[second]})
        assert whole.ops == once.ops
        assert {b.name: b for b in whole.buffers} == once.buffer
        assert whole.updates == once.updates


def test_regions_within_one_another_are_not_cut_at_once() -> None:
    dataflow = two_regions()
    loss, layer = dataflow.regions
    around = Window((*layer.windows[0].ops, *loss.windows[0].ops))
    both = replace(loss, name="both", windows=(around,))
    assert _apart(dataflow, [(loss, (32, 32)), (layer, (32, 32))])[1] == []
    assert _apart(dataflow, [(both, (32, 32)), (loss, (32, 32))])[1] == [(loss, (32, 32))]


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_parts_have_all_rows_once_and_are_alike_but_for_the_last(length: int, parts: int) -> None:
    rows = part_rows(length, parts)
    assert sum(rows) == length
    assert len(rows) <= parts
    assert len({*rows[:-1]}) <= 1
    assert 0 < rows[-1] <= rows[0]


@given(st.integers(2, BATCH))
def test_the_work_is_that_of_the_step_and_what_is_whole_is_done_by_each_part(parts: int) -> None:
    dataflow = head()
    split = split_regions(dataflow, {"loss": parts})
    split.verify_read()
    count = len(part_rows(BATCH, parts))
    names = ("forward_2", "loss", "backward_2")
    whole = sum(dataflow.ops[dataflow.position[name]].flops for name in names)
    assert sum(op.flops for op in split.ops if "_part" in op.name) == whole
    parts_of = [op for op in split.ops if op.name.startswith("backward_2_part")]
    moved = [op.bytes_moved for op in parts_of if "collected" not in op.name]
    backward = dataflow.ops[dataflow.position["backward_2"]]
    assert sum(moved) == backward.bytes_moved + (count - 1) * 2 * WEIGHT_BYTES
    pieces = [b.nbytes for b in split.buffers if b.name.startswith("forward_2_part")]
    assert sum(pieces) == dataflow.buffer["h2"].nbytes
    assert split.update["w2"].gradient == "backward_2"


def test_one_part_is_the_step_itself() -> None:
    dataflow = head()
    assert split_regions(dataflow, {"loss": 1}) is dataflow
    assert split_regions(dataflow, {}) is dataflow


def test_a_part_is_forward_and_backward_before_the_next_part_begins() -> None:
    split = split_regions(head(), {"loss": 2})
    names = [op.name for op in split.ops if "_part" in op.name]
    assert [n for n in names if "collected" not in n] == [
        f"{op}_part{part}" for part in (0, 1) for op in ("forward_2", "loss", "backward_2")
    ]
    assert {op.phase for op in split.ops if "_part" in op.name} == {Phase.BACKWARD}


def test_a_saved_step_has_its_regions() -> None:
    assert from_json(to_json(head()), Dataflow) == head()


def test_a_plan_of_a_step_in_parts_is_checked_and_takes_less() -> None:
    dataflow = head()
    problem = formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    plans = [
        schedule(problem, replace(resident(dataflow), splits=splits))
        for splits in ({}, {"loss": 8})
    ]
    for plan in plans:
        check(problem, plan)
    whole, parts = (plan.predicted.peak_bytes[Tier.DEVICE] for plan in plans)
    assert parts < whole


@pytest.mark.parametrize("splits", [{"nothing": 2}, {"loss": 0}, {"loss": BATCH + 1}])
def test_a_plan_in_parts_that_the_step_has_not_is_refused(splits: dict[str, int]) -> None:
    dataflow = head()
    problem = formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    plan = schedule(problem, resident(dataflow))
    wrong = replace(plan, placement=replace(plan.placement, splits=splits))
    with pytest.raises(PlanError, match="splits"):
        check(problem, wrong)


def test_what_is_called_as_an_op_of_the_whole_step_takes_its_own_seconds() -> None:
    """Room for a result is made by an op of the name of that which makes it whole."""
    budgets = dict.fromkeys(MEMORIES, 1 << 40)
    step = head()
    ops = (replace(op, flops=10**12 * (op.name == "backward_2")) for op in step.ops)
    written = formulate(replace(step, ops=tuple(ops)), find("rtx4090"), budgets)
    parts = written.splitting({"loss": 4})
    alone = formulate(parts.dataflow, find("rtx4090"), budgets)
    rooms = [op.name for op in parts.dataflow.ops if op.target in (ZEROS, EMPTY)]
    assert "backward_2" in rooms
    for name in rooms:
        assert parts.costs.device_s[name] == alone.costs.device_s[name]
    assert parts.costs.device_s["backward_2"] < 0.01 * written.costs.device_s["backward_2"]
