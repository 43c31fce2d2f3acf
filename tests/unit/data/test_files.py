"""What is saved is loaded again exactly; what is damaged is refused with the place in words."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cotrain_compile.cluster.sources.profile_files import read_profile
from cotrain_compile.dataflow import (
    MOST_BYTES,
    Buffer,
    Dataflow,
    Op,
    Phase,
    Role,
    SizeExpressions,
    UpdateGroup,
)
from cotrain_compile.errors import FormatError
from cotrain_compile.files import from_json, kind_of, load, parsed, save, to_json
from cotrain_compile.machine import HostUpdate, Link, Machine, Tier, TierSpec, two_tier
from cotrain_compile.plan import (
    HostRegion,
    Placement,
    Plan,
    Span,
    Timeline,
    Transfer,
    UpdateMode,
)
from cotrain_compile.presets import find
from tests.support.dataflow_text import parse, text
from tests.support.dataflows import chain, mixed_precision_step, random_dataflows

MACHINE = two_tier(
    "desk",
    device=TierSpec(8 << 30, 1e12, {"float32": 1e13}, launch_s=3e-6),
    host=TierSpec(64 << 30, 5e10, {"float32": 1e11}),
    h2d=Link(2.2e10, 1e-5),
    d2h=Link(2.1e10),
    host_update=HostUpdate(3e10, workers=4, slowdown_while_copying=1.25),
)
TIMELINE = Timeline(
    "predicted",
    (Span("device", "forward_0", 0.0, 0.1 + 0.2),),
    {Tier.DEVICE: 7},
    {Tier.DEVICE: ((0.0, 3), (1e-9, 7))},
)
PLAN = Plan(
    "chain-1",
    "desk",
    {Tier.DEVICE: 8, Tier.HOST: 64},
    Placement("greedy", {"w0": Tier.DEVICE, "m0": Tier.HOST}, {"w0": UpdateMode.HOST}, ("h0",)),
    (
        Transfer("down", "offload", "g0", 4, "backward_0", None),
        HostRegion("update", "w0", ("update_0",), "backward_0", None, after=("down",)),
    ),
    TIMELINE,
)
VALUES = [MACHINE, chain(2), PLAN.placement, PLAN, TIMELINE]

names = st.text(max_size=8)
name_tuples = st.lists(names, max_size=3).map(tuple)
counts = st.integers(0, 1 << 70)
expressions = st.dictionaries(names, names, max_size=2)


def without_draws(ops: list[Op], buffers: list[Buffer]) -> list[Op]:
    """Those that may be part of an update: they draw nothing, and exchange nothing."""
    generators = {buffer.name for buffer in buffers if buffer.role in (Role.RNG, Role.GROUP)}
    return [op for op in ops if generators.isdisjoint((*op.reads, *op.writes))]


@st.composite
def odd_dataflows(draw: st.DrawFn, names: st.SearchStrategy[str] = names) -> Dataflow:
    """Dataflows whose names fit together and whose other fields take any value of their type."""
    any_buffer = st.tuples(
        st.integers(0, MOST_BYTES // 3), st.sampled_from(Role), st.booleans(), st.booleans()
    )
    buffers = [
        Buffer(name, *draw(any_buffer))
        for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))
    ]
    some = st.sampled_from([buffer.name for buffer in buffers])
    several = st.lists(some, max_size=3).map(tuple)
    sizes = st.dictionaries(names, names, max_size=2)
    ops: list[Op] = []
    made = [buffer.name for buffer in buffers if buffer.is_input]
    for name in draw(st.lists(names, max_size=3, unique=True)):
        reads = draw(st.lists(st.sampled_from(made), max_size=3)) if made else []
        writes = draw(several)
        kinds = draw(names), draw(st.sampled_from(Phase))
        ops.append(Op(name, *kinds, tuple(reads), writes, draw(counts), draw(counts), draw(names)))
        made += writes
    params = [buffer.name for buffer in buffers if buffer.role is Role.PARAM]
    low_precision = st.just("") | some
    updates = []
    for param, op in zip(params, without_draws(ops, buffers), strict=False):
        inputs = {buffer.name for buffer in buffers if buffer.is_input}
        gradients = sorted((inputs | {*op.reads}) - {param})
        if gradients:
            gradient = draw(st.sampled_from(gradients))
            rest = draw(several), (op.name,), draw(low_precision), draw(st.booleans())
            updates.append(UpdateGroup(param, gradient, (param,), *rest))
    return Dataflow(
        draw(names),
        tuple(ops),
        tuple(buffers),
        tuple(updates),
        draw(st.dictionaries(names, st.integers(), max_size=2)),
        draw(st.builds(SizeExpressions, sizes, sizes, sizes)),
    )


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_saved_value_is_loaded_as_it_was(tmp_path: Path, value: Any) -> None:
    save(value, tmp_path / "value.json")
    assert load(tmp_path / "value.json", type(value)) == value
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


@given(odd_dataflows())
def test_any_dataflow_comes_back_from_json_and_from_text(dataflow: Dataflow) -> None:
    assert from_json(to_json(dataflow), Dataflow) == dataflow
    assert parse(text(dataflow)) == dataflow


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(5e-324)
def test_seconds_keep_every_bit(seconds: float) -> None:
    timeline = Timeline("measured", (Span("host", "update", -seconds, seconds),), {})
    assert from_json(to_json(timeline), Timeline) == timeline


def test_caches_inside_a_dataflow_are_not_saved() -> None:
    used, fresh = chain(1), chain(1)
    assert used.buffer
    assert used.position
    assert to_json(used) == to_json(fresh)


@given(st.data())
def test_a_truncated_document_is_always_refused(data: st.DataObject) -> None:
    whole = to_json(chain(1)).rstrip()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(FormatError, match=r"step\.json: .*truncated or corrupted"):
        from_json(whole[:cut], Dataflow, where="step.json")


@given(st.data())
def test_a_corrupted_document_is_refused_or_still_of_its_type(data: st.DataObject) -> None:
    whole = to_json(PLAN)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + data.draw(st.characters(codec="utf-8")) + whole[at + 1 :]
    try:
        found = from_json(damaged, Plan)
    except FormatError:
        return
    assert from_json(to_json(found), Plan) == found


def _changed(value: Any, *path: Any, to: Any) -> str:
    """The document of `value` with the field at `path` set, or left out when `to` is None."""
    document = json.loads(to_json(value))
    place = document
    for part in path[:-1]:
        place = place[part]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(document)


@pytest.mark.parametrize(
    ("value", "path", "to", "complaint"),
    [
        (MACHINE, ["kind"], "plan", r"m\.json: kind is 'plan', not 'machine'; give a machine file"),
        (MACHINE, ["kind"], None, r"kind is missing"),
        (MACHINE, ["format_version"], 3, r"format_version is 3, this program reads 2; make the"),
        (
            MACHINE,
            ["data", "links", "h2d", "speed"],
            1,
            r"links.*h2d.*speed: unknown field",
        ),
        (MACHINE, ["data", "links", "h2d", "bytes_per_s"], None, r"bytes_per_s: missing field"),
        (MACHINE, ["data", "links", "h2d", "bytes_per_s"], -1.0, r"bytes_per_s must be positive"),
        (MACHINE, ["data", "links", "h2d", "bytes_per_s"], "fast", r"found 'fast'; correct"),
        (MACHINE, ["data", "links", "h2d", "source"], "disk", r"h2d goes from 'disk' to 'device'"),
        (MACHINE, ["data", "links", "h2d", "source"], "device", r"h2d goes from 'device' to 'dev"),
        (MACHINE, ["data", "processors", "host", "space"], "disk", r"host works in 'disk', which"),
        (
            MACHINE,
            ["data", "shared_paths", 0, "links", 0],
            "x",
            r"shared_paths names \['x'\], no l",
        ),
        (MACHINE, ["data", "shared_paths", 0, "together"], math.nan, r"together: .*finite number"),
        (MACHINE, ["data", "shared_paths", 0, "together"], 3.0, r"between 1.0 \(shared\) and 2.0"),
        (MACHINE, ["data", "name"], "\ud800", r"m\.json: "),
        (chain(1), ["data", "ops", 1, "reads"], "h0", r"ops\[1\]\.reads: Input should be a valid"),
        (chain(1), ["data", "ops", 1, "reads", 0], 7, r"ops\[1\]\.reads\[0\]: .*, found 7"),
        (chain(1), ["data", "ops", 1, "flops"], 1.5, r"ops\[1\]\.flops: .*valid integer"),
        (chain(1), ["data", "buffers", 0, "role"], "cat", r"buffers\[0\]\.role: .*'cat'"),
        (PLAN, ["data", "tasks", 1, "param"], 3, r"tasks\[1\]\.HostRegion\.param: .*found 3"),
        (PLAN, ["data", "tasks", 0, "nbytes"], None, r"tasks\[0\]\.Transfer\.nbytes: missing"),
        (PLAN, ["data", "placement", "homes", "l.0"], "moon", r"homes\['l\.0'\]: .*'moon'"),
    ],
)
def test_a_wrong_field_is_named(value: Any, path: list[Any], to: Any, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        from_json(_changed(value, *path, to=to), type(value), where="m.json")


def machine_of_version_1(**changes: object) -> str:
    """MACHINE as the first version of the format has it."""
    data = {
        "name": "desk",
        "device": asdict(MACHINE.device),
        "host": asdict(MACHINE.host),
        "h2d": {"bytes_per_s": 2.2e10, "latency_s": 1e-5},
        "d2h": {"bytes_per_s": 2.1e10, "latency_s": 0.0},
        "host_update": asdict(MACHINE.host_update),
        "duplex": 2.0,
        "source": "",
        "issue_s": 0.0,
        "fuses_updates": False,
    }
    return json.dumps({"kind": "machine", "format_version": 1, "data": {**data, **changes}})


def test_a_machine_of_the_first_version_is_read() -> None:
    """A calibration that somebody has made stays good; its mistakes are named by its own fields."""
    assert from_json(machine_of_version_1(), Machine) == MACHINE
    shared = from_json(machine_of_version_1(duplex=1.0, issue_s=1e-6), Machine)
    assert shared == MACHINE.but(duplex=1.0, issue_s=1e-6)
    wrong: tuple[tuple[str, object, str], ...] = (
        ("h2d", {"bytes_per_s": 1e9, "speed": 1}, r"m\.json: h2d\.speed: unknown field"),
        ("d2h", {"bytes_per_s": -1.0}, r"d2h: bytes_per_s must be positive"),
        ("duplex", 3.0, r"duplex must lie between"),
        ("links", {}, r"links: unknown field"),
    )
    for field, value, complaint in wrong:
        with pytest.raises(FormatError, match=complaint):
            from_json(machine_of_version_1(**{field: value}), Machine, where="m.json")


@pytest.mark.parametrize("read", [lambda path: load(path, Machine), kind_of, read_profile])
def test_a_document_that_says_a_key_twice_is_refused(tmp_path: Path, read: Any) -> None:
    whole, path = to_json(find("rtx4090")), tmp_path / "machine.json"
    for twice in ('"kind":"plan",', '"data":{},'):
        path.write_text(whole.replace("{", "{" + twice, 1))
        with pytest.raises(FormatError, match=r"machine\.json: an object has the key '\w+' twice"):
            read(path)
    assert parsed('[{"a": {"b": 1}}, {"a": {"b": 2}}]') == [{"a": {"b": 1}}, {"a": {"b": 2}}]


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000, b"9" * 1_000_000],
    ids=["empty", "null", "list", "not utf-8", "deep lists", "deep objects", "huge number"],
)
def test_a_strange_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"plan\.json"):
        load(tmp_path / "plan.json", Plan)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (Placement("\ud800", {}, {}), "cannot be saved as JSON"),
        (Placement("p", {"w": "host"}, {}), r"homes\.w: .*Tier"),  # type: ignore[dict-item]
        (Placement("p", {}, {}, ["h"]), "offloaded: .*tuple"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_is_not_of_its_type_is_not_saved(value: Placement, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        to_json(value)


def test_what_could_not_be_loaded_is_not_saved_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    save(TIMELINE, path)
    bad = Timeline("measured", (Span("host", "update", 0.0, math.nan),), {})
    with pytest.raises(FormatError, match=r"timeline\.json cannot be saved: spans\[0\]\.end_s"):
        save(bad, path)
    assert load(path, Timeline) == TIMELINE


@given(random_dataflows())
def test_text_has_one_line_for_each_op_and_buffer(dataflow: Dataflow) -> None:
    lines = text(dataflow).splitlines()
    assert sum(line.startswith("op ") for line in lines) == len(dataflow.ops)
    assert sum(line.startswith("buffer ") for line in lines) == len(dataflow.buffers)


def test_text_of_an_op_reads_like_a_sentence() -> None:
    assert (
        "op update_0 optimizer test.update (g32_0 p32_0 m_0 v_0 lr) -> (p32_0 m_0 v_0) "
        "4000 28000 float32 -"
    ) in text(mixed_precision_step(1)).splitlines()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("operation x", "line 2: .*starts with none of dataflow, symbol, op"),
        ("op mm forward t (a) (b) 1 1 f -", "line 2: .*expected op name phase target"),
        ("op mm forward t (a) -> b 1 1 f -", "expected op name phase target"),
        ("op mm sideways t (a) -> (b) 1 1 f -", "'sideways' is not a valid Phase"),
        ("buffer b many param ()", "many"),
        ("buffer b 1 param (big)", "flags are input and output"),
        ("size weight b s0", "unknown size 'weight'"),
        ("dataflow again", "found 2 lines"),
    ],
)
def test_a_bad_line_is_named(line: str, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        parse(f"dataflow f\n{line}\n")
