"""No file brings the command line down: what is damaged or hostile is refused in our words.

Files of a real step are cut, flipped and bent (`fuzz_files`), then read by the commands that read
them. Whatever comes of it is an answer or one of our errors, and no text in a file is obeyed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cotrain_compile import files, presets
from cotrain_compile.cli.main import app
from cotrain_compile.dataflow import MOST_BYTES, Buffer, Dataflow, Role
from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.plan import Plan
from tests.support.examples import examples
from tests.support.fuzz.fuzz_commands import (
    CASES,
    CONTROL,
    PROBLEM,
    STEP,
    TEXTS,
    case,
    run,
    with_files,
)
from tests.support.fuzz.fuzz_files import NAMES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_files(tmp_path_factory.mktemp("files"))


@examples(40)
@given(st.integers(0, 1 << 60))
def test_a_bent_or_damaged_file_is_answered_or_refused(folder: Path, seed: int) -> None:
    case(folder, seed)


@pytest.mark.parametrize(("kind", "command"), CASES)
def test_the_files_as_they_are_are_read(folder: Path, kind: str, command: str) -> None:
    arguments = [str(folder / a) if "." in a else a for a in command.split()]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, (kind, result.exception)


def renamed(text: str, old: str, new: str) -> str:
    """A document in which something has another name, wherever it stands."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {walk(key): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return new if value == old else value

    return json.dumps(walk(json.loads(text)))


ROLES = ("w0", "f_l1", "rtx4090", STEP.fingerprint)


def marked(number: int, position: int) -> Any:
    """A name in a role: in every run a name has one of them, in a long one all."""
    name, role = NAMES[number], ROLES[position]
    marks = () if number % len(ROLES) == position else pytest.mark.long
    return pytest.param(role, name, marks=marks, id=f"{role[:8]}-{ascii(name)[:24]}")


@pytest.mark.parametrize(
    ("role", "name"), [marked(n, p) for n in range(len(NAMES)) for p in range(len(ROLES))]
)
def test_a_name_is_shown_and_never_obeyed(tmp_path: Path, name: str, role: str) -> None:
    for kind, text in TEXTS.items():
        (tmp_path / f"{kind}.json").write_text(renamed(text, role, name))
    said = run(tmp_path, "show plan.json --html out.html --machine machine.json")
    said += run(tmp_path, "show plan.json --perfetto out.json")
    said += run(tmp_path, "graph step.json --level op -o out.dot")
    said += run(tmp_path, "graph step.json --plan plan.json --level op")
    said += run(tmp_path, "show machine.json")
    assert not CONTROL.search(said)
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    if (tmp_path / "out.html").exists():
        page = (tmp_path / "out.html").read_text()
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert len(re.findall("<script", page)) == len(re.findall("</script>", page))
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix not in (".json", ".html")) == [
        "out.dot"
    ]


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "pipe.json")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    for path in (tmp_path / "pipe.json", tmp_path / "link.json", tmp_path, Path("/dev/zero")):
        with pytest.raises(FormatError, match=r"is a folder, pipe or device; give the plan file"):
            files.load(path, Plan)
        with pytest.raises(FormatError, match="is a folder, pipe or device"):
            files.kind_of(path)
        with pytest.raises(OptionError, match="no machine named"):
            presets.find(str(path))
    with pytest.raises(FormatError, match="cannot be the name of a file"):
        files.load("a\0b", Plan)
    with pytest.raises(OSError, match="symbolic links"):
        files.load(tmp_path / "loop.json", Plan)
    with pytest.raises(OptionError, match="no machine named"):
        presets.find("m" * 5000)


def test_a_file_that_no_step_can_have_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(files.LARGEST_FILE_BYTES + 1)  # a hole: no disk is needed
    with pytest.raises(FormatError, match="has 4,294,967,297 bytes, so it is no machine file"):
        files.load(path, Machine)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"budgets":{"device"', '"budgets":{"host"', "has the key 'host' twice"),
        ('"device":20971520,"host"', '"host"', "budgets has nothing for the device"),
        ('"wait_before":', '"after":["ghost"],"wait_before":', "comes after 'ghost', which is no"),
        ('"wait_before":"', '"wait_before":"x', "waits for .* and has no span on the device"),
        ('{"lane":"h2d","name":"', '{"lane":"h2d","name":"x', "has no span in predicted"),
        ('"nbytes":', '"nbytes":-', "moves -[0-9]+ bytes"),
        ('"source":"predicted"', '"source":"measured"', "its timeline is a measured one"),
        ('"lane":"device"', '"lane":"moon"', "is on lane 'moon'"),
        ('"start_s":0.0', '"start_s":1e300', r"goes from 1e\+300 s to"),
        ('"lower_bound_s":', '"ignored":1.0,"lower_bound_s":', "unknown field"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    text = TEXTS["plan"].replace(',"after":[]', "") if "ghost" in new else TEXTS["plan"]
    assert old in text
    (tmp_path / "plan.json").write_text(text.replace(old, new, 1))
    assert re.search(complaint, run(tmp_path, "show plan.json"))


RATE = re.findall(r'"bytes_per_s":[^,}]+', TEXTS["machine"])[0]


@pytest.mark.parametrize(
    ("kind", "old", "new", "complaint"),
    [
        ("step", '"ops":["', '"ops":["x', r"the update of w0 names \['x"),
        ("step", '"states":["m_w0"', '"states":["g_w0"', "does not keep"),
        ("step", '{"param":"w1"', '{"param":"coefficient"', "coefficient is updated and no param"),
        ("step", '"ops":["u_w0"]', '"ops":[]', "the update of w0 has no ops"),
        ("step", '"ops":["u_w1"]', '"ops":["u_w0"]', "name an op twice"),
        ("step", '{"param":"w1"', '{"param":"w0"', "two updates are of one parameter"),
        ("step", '"low_precision":"', '"low_precision":"ghost', r"of w0 names \['ghost"),
        ("step", '"param":""', '"param":"coefficient"', "of coefficient, no parameter here"),
        ("step", '"nbytes":', '"nbytes":99999999999999999999', "more bytes than there are"),
        (
            "step",
            '"gradient":"g_w1"',
            '"gradient":"g_w0"',
            "of w1 does not read g_w0, its gradient",
        ),
        ("step", '"gradient":"g_w1"', '"gradient":"w1"', "update of w1 is its own gradient"),
        ("machine", '"workers":1', f'"workers":{10**400}', "no computer has 10000"),
        ("machine", RATE, '"bytes_per_s":1e-25', "bytes_per_s: no computer has 1e-25"),
    ],
)
def test_a_step_or_machine_that_cannot_be_is_refused(
    tmp_path: Path, kind: str, old: str, new: str, complaint: str
) -> None:
    assert old in TEXTS[kind]
    (tmp_path / f"{kind}.json").write_text(TEXTS[kind].replace(old, new, 1))
    assert re.search(complaint, run(tmp_path, f"show {kind}.json"))


def test_ops_in_another_order_are_refused_by_name(tmp_path: Path) -> None:
    """And not as a plan that is unsound, when it has been solved."""
    document = json.loads(TEXTS["step"])
    ops = document["data"]["ops"]
    ops.append(ops.pop(0))
    (tmp_path / "step.json").write_text(json.dumps(document))
    assert re.search(
        r"op f\S* reads \S+, which no op before it has made; the ops are in another order",
        run(tmp_path, "show step.json"),
    )


UNWRITABLE = [
    "trace job.py:build -o absent/step.json",
    "solve step.json -o absent/plan.json",
    "solve step.json -o absent/plan.json --memory-budget 1GiB --memory-budget 2GiB",
    "solve step.json -o .",
    "sweep step.json -o taken/swept.d",
    "calibrate -o absent/machine.json",
    "graph step.json -o absent/step.svg",
    "show plan.json --html absent/page.html",
    "show plan.json --perfetto absent/trace.json",
    "show plan.json --timeline absent/plan.png",
    "demo --output taken/demo.d",
]


@pytest.mark.parametrize("command", UNWRITABLE)
def test_what_cannot_be_written_is_refused_before_any_work(tmp_path: Path, command: str) -> None:
    """There is nothing to read either: whoever reads first complains of that."""
    (tmp_path / "taken").touch()
    assert re.search(r"--\w+ \S+ cannot be (written|made) \(", run(tmp_path, command))


def test_all_buffers_together_have_no_more_bytes_than_there_are() -> None:
    half = Buffer("half", MOST_BYTES // 2, Role.BATCH, is_input=True)
    assert Dataflow("whole", (), (half, replace(half, name="other"))).buffers
    with pytest.raises(ValueError, match="bytes, more than there are"):
        Dataflow("more", (), (half, replace(half, name="other", nbytes=MOST_BYTES // 2 + 1)))


def test_a_plan_with_the_fingerprint_of_a_step_and_other_names_is_refused(folder: Path) -> None:
    (folder / "other.json").write_text(renamed(TEXTS["plan"], "w0", "ghost"))
    for command in (
        "graph step.json --plan other.json",
        "diff other.json plan.json --step step.json",
        "explain other.json w1",
        "show other.json",
    ):
        assert "has the fingerprint of" in run(folder, command)


ODD: list[Any] = [*NAMES, 10**400, -1, 0, 1.5, float("nan"), float("inf"), None, [], {}, [None]]
ODD += [
    "9" * 400 + "GiB",
    "1e5",
    "0.1",
    "0%",
    "0.000000000001%",
    "101%",
    {"a": 1},
    {1: 2},
    ("x",),
    b"x",
    object,
    2**31,
]


def understood(name: str, value: Any) -> bool:
    """Whether an option is; else it is refused by name."""
    try:
        found = Options.parse({name: value})
    except OptionError as error:
        assert name in vars(Options()) or "unknown option" in str(error)  # noqa: PT017
        return False
    assert found.budgets(PROBLEM.machine)[Tier.DEVICE] > 0
    return True


@pytest.mark.parametrize("name", vars(Options()))
def test_odd_values_of_an_option_are_understood_or_refused(name: str) -> None:
    answers = [understood(name, value) for value in ODD]
    assert not all(answers)


@given(st.sampled_from([*vars(Options()), *NAMES]), st.text(max_size=20) | st.integers())
def test_any_option_is_understood_or_refused(name: str, value: Any) -> None:
    understood(name, value)


def test_options_that_are_no_dictionary_of_names_are_refused() -> None:
    wrong: list[Any] = [[], "quiet", 3, {1: 2}, {None: 1}]
    for options in wrong:
        with pytest.raises(OptionError, match="option"):
            Options.parse(options)


def test_nothing_that_is_read_is_run() -> None:
    """Sources that could run what they read; `symbolic` has a reader of its own instead.

    YAML of other frameworks is read by its safe loader alone.
    """
    root = Path(__file__).parents[3]
    code = r"\bpickle\.|import pickle|(?<!def )\beval\(|\bexec\("
    data = r"\byaml\.(?!safe_load\(|YAMLError\b)|from yaml|\bmarshal\b|parse_expr"
    runs = re.compile(f"{code}|{data}")
    loads = re.compile(r"torch\.load\((?!.*weights_only=True)|shell=True|os\.system")
    sources = itertools.chain(*((root / top).rglob("*.py") for top in TOPS))
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if runs.search(line) or loads.search(line)
    ]
    assert found == []


TOPS = ("cotrain_compile", "backends", "passes")
