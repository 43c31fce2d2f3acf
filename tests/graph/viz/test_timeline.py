"""A picture of a timeline shows what happened; a trace holds it to the microsecond."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors, image

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.plan import (
    HostRegion,
    Lane,
    MovedOps,
    Placement,
    Plan,
    Span,
    Timeline,
    Transfer,
    UpdateMode,
)
from cotrain_compile.viz.kinds import COLOURS, kinds_of
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.specification import Specification, specify
from cotrain_compile.viz.timeline import draw_timelines


def timeline(*spans: Span) -> Timeline:
    memory = {Tier.DEVICE: ((0.0, 100), (0.5, 300))}
    return Timeline("predicted", spans, {Tier.DEVICE: 300, Tier.HOST: 50}, memory)


def plan(predicted: Timeline) -> Plan:
    return Plan(
        fingerprint="f",
        machine="m",
        budgets={Tier.DEVICE: 400, Tier.HOST: 400},
        placement=Placement("zero-offload", {"w": Tier.DEVICE}, {"w": UpdateMode.HOST}),
        tasks=(
            Transfer("offload.w", "offload", "w", 4, None, None),
            Transfer("offload.g", "offload", "g", 10**9, "mm", None),
            HostRegion("update.w", "w", ("mul",), "mm", None),
            Transfer("prefetch.w", "prefetch", "w", 4, "mm", None, destination="w"),
        ),
        predicted=predicted,
    )


STEP = timeline(
    Span(Lane.D2H, "offload.w", 0.0, 0.1),
    Span(Lane.DEVICE, "mm", 0.0, 0.4),
    Span(Lane.D2H, "offload.g", 0.4, 0.6),
    Span(Lane.HOST, "update.w", 0.6, 0.9),
    Span(Lane.H2D, "prefetch.w", 0.9, 1.0),
)
STEP_OPS = Dataflow(
    "f",
    ops=(
        Op("mm", "aten.mm.default", Phase.BACKWARD, ("w",), ("g",), module="net.0"),
        Op("mul", "aten.mul.Tensor", Phase.OPTIMIZER, ("g", "w"), ("w",)),
    ),
    buffers=(
        Buffer("w", 4, Role.PARAM, is_input=True, is_output=True),
        Buffer("g", 4, Role.TEMPORARY),
    ),
    updates=(UpdateGroup("w", "g", (), (), ("mul",)),),
)


def drawn(whole: Timeline) -> Specification:
    return specify([whole], plan(whole), STEP_OPS)


KINDS = {
    "mm": "backward",
    "offload.w": "weight",
    "offload.g": "gradient",
    "prefetch.w": "weight",
}


def pixels_of(colour: str, path: Path) -> int:
    """How many pixels of a picture have exactly that colour."""
    wanted = np.array(colors.to_rgb(colour))
    picture = image.imread(path)[..., :3]
    return int((np.abs(picture - wanted) < 0.01).all(axis=-1).sum())


def test_gradients_and_weights_are_told_apart() -> None:
    assert kinds_of(plan(STEP), {"mm": Phase.BACKWARD}) == KINDS


def test_what_leaves_and_comes_back_is_told_from_what_lives_on_the_host() -> None:
    tasks = (
        HostRegion("cast.w", "w", ("to",), None, None, makes="w16"),
        Transfer("fetch.w16", "prefetch", "w16", 2, None, "mm", ("cast.w",)),
        Transfer("offload.x", "offload", "x", 4, "mm", "gelu"),
        Transfer("fetch.x", "prefetch", "x", 4, "gelu", "mm_backward", ("offload.x",)),
        Transfer("offload.g", "offload", "g", 4, "mm_backward", None),
        Transfer("fetch.g", "prefetch", "g", 4, "mm_backward", "mul", ("offload.g",)),
        Transfer("fetch.m", "prefetch", "m", 4, "mm_backward", "mul"),
        Transfer("store.m", "offload", "m", 4, "mul", None, destination="m"),
        Transfer("store.w", "offload", "w", 4, "mul", None, destination="w"),
    )
    moved = (MovedOps(("mul",), "mm_backward"),)
    assert kinds_of(replace(plan(STEP), tasks=tasks, moved=moved)) == {
        "cast.w": "cast on the host",
        "fetch.w16": "weight",
        "offload.x": "activation",
        "fetch.x": "activation",
        "offload.g": "gradient",
        "fetch.g": "gradient",
        "fetch.m": "optimizer state",
        "store.m": "optimizer state",
        "store.w": "weight",
    }


def test_an_op_that_a_pass_has_made_again_is_as_the_one_before_it(tmp_path: Path) -> None:
    ops = timeline(Span(Lane.DEVICE, "view", 0.0, 0.1), *STEP.spans)
    again = replace(ops, spans=(*ops.spans, Span(Lane.DEVICE, "view_1", 1.0, 1.1)))
    save_trace(drawn(again), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = {e["args"]["node"]: e["cat"] for e in events if e["ph"] == "X"}
    assert kinds["view"] == kinds["view_1"] == "backward"


def test_kinds_that_are_drawn_together_differ_in_colour() -> None:
    """Work and copies of which no more is known stand alone on their lanes."""
    known = [c for kind, c in COLOURS.items() if kind not in ("work on the device", "copy")]
    assert len(set(known)) == len(known)


def test_every_kind_of_work_is_seen_in_its_colour(tmp_path: Path) -> None:
    path = tmp_path / "step.png"
    draw_timelines(drawn(STEP), path)
    seen = {kind for kind, colour in COLOURS.items() if pixels_of(colour, path) > 500}
    assert {"backward", "update on the host", "weight"} <= seen
    assert "optimizer" not in seen


def test_twice_the_work_is_twice_the_area(tmp_path: Path) -> None:
    areas = []
    for seconds in (0.2, 0.4):
        work = timeline(Span(Lane.DEVICE, "a", 0.0, 1.0), Span(Lane.HOST, "u", 0.0, seconds))
        draw_timelines(specify([work]), tmp_path / "step.png")
        areas.append(pixels_of(COLOURS["update on the host"], tmp_path / "step.png"))
    # The legend's patch is in both.
    assert areas[1] / areas[0] == pytest.approx(2, rel=0.1)


def test_thousands_of_spans_fill_their_lane(tmp_path: Path) -> None:
    spans = [Span(Lane.DEVICE, f"op{n}", n * 1e-5, (n + 1) * 1e-5) for n in range(5000)]
    draw_timelines(specify([timeline(*spans)] * 2), tmp_path / "many.png")
    one_op = timeline(Span(Lane.DEVICE, "op", 0, 5e-2))
    draw_timelines(specify([one_op] * 2), tmp_path / "one.png")
    colour = COLOURS["work on the device"]
    many, one = (pixels_of(colour, tmp_path / f"{name}.png") for name in ("many", "one"))
    assert many == pytest.approx(one, rel=0.02)


def test_an_empty_timeline_is_an_empty_picture(tmp_path: Path) -> None:
    draw_timelines(specify([Timeline("measured", (), {})]), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_a_trace_has_each_lane_as_a_named_thread_in_microseconds(tmp_path: Path) -> None:
    """What takes no time is no slice; a click on one that copies shows bytes and rate."""
    view = Span(Lane.DEVICE, "view", 0.4, 0.4)
    save_trace(drawn(replace(STEP, spans=(*STEP.spans, view))), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert order.keys() == threads.keys()
    assert sorted(threads, key=order.__getitem__) == list(threads)
    slices = {e["args"]["node"]: e for e in events if e["ph"] == "X"}
    assert slices.keys() == {span.name for span in STEP.spans}
    work = [(threads[e["tid"]], e["name"], e["cat"]) for e in slices.values()]
    assert ("host", "update w", "update on the host") in work
    assert ("device to host", "offload gradient of w", "gradient") in work
    assert ("device", "net.0: mm", "backward") in work
    assert slices["offload.g"]["args"] == {
        "node": "offload.g",
        "layer": "w",
        "what": "g",
        "bytes": 10**9,
        "GB/s": 5.0,  # in 0.2 s
        "parameter": "w",
    }
    busy_us = sum(e["dur"] for e in slices.values() if threads[e["tid"]] == "device")
    assert busy_us == pytest.approx(STEP.busy_s(Lane.DEVICE) * 1e6)


def test_a_trace_of_a_timeline_alone_has_its_memory(tmp_path: Path) -> None:
    save_trace(specify([STEP]), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"bytes": 100}, {"bytes": 300}]
