"""The command line: words for every file, one line an error, plans handed over to torch.compile."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import cotrain_compile
from cotrain_compile import __version__, files, presets
from cotrain_compile.cli.main import app, main
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.errors import FormatError, OptionError, PlanError
from cotrain_compile.jobs import load_job
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.plan import Lane, Placement, Plan, Span, Timeline, UpdateMode
from cotrain_compile.runtime.calibrate import calibrate

DATAFLOW = Dataflow(
    fingerprint="f1",
    ops=(Op("mm", "aten.mm.default", Phase.FORWARD, ("w", "h"), ("w",), flops=8_000_000_000),),
    buffers=(
        Buffer("w", 1024, Role.PARAM, is_input=True),
        Buffer("h", 2048, Role.BATCH, is_input=True),
    ),
    updates=(UpdateGroup("w", gradient="h", states=(), scalars=(), ops=("mm",)),),
)
PLAN = Plan(
    fingerprint="f1",
    machine="rtx4090",
    budgets={Tier.DEVICE: 4096, Tier.HOST: 4096},
    placement=Placement("resident", {"w": Tier.DEVICE}, {"w": UpdateMode.RESIDENT}),
    tasks=(),
    predicted=Timeline(
        "predicted", (Span(Lane.DEVICE, "mm", 0.0, 0.25),), {Tier.DEVICE: 3072, Tier.HOST: 0}
    ),
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def error_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> str:
    """What `cotrain-compile ARGS` says on stderr when it fails with exit code 1."""
    monkeypatch.setattr(sys, "argv", ["cotrain-compile", *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    return capsys.readouterr().err


def test_the_version_is_the_package_s() -> None:
    assert run("--version") == f"cotrain-compile {__version__}\n"


def test_the_command_line_is_there_where_its_script_is_not_on_the_path() -> None:
    command = [sys.executable, "-m", "cotrain_compile", "show", "absent.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: absent.json")


def test_a_plan_is_told_in_words_and_drawn(tmp_path: Path) -> None:
    files.save(PLAN, tmp_path / "plan.json")
    files.save(DATAFLOW, tmp_path / "step.json")
    picture = tmp_path / "step.png"
    said = run("show", str(tmp_path / "plan.json"), "--timeline", str(picture))
    assert "everything on the device (resident) on rtx4090" in said
    assert "250.0 ms a step" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_step_is_told_in_words(tmp_path: Path) -> None:
    files.save(DATAFLOW, tmp_path / "step.json")
    said = run("show", str(tmp_path / "step.json"))
    assert "1 ops, 8.0 Gflop" in said
    assert "3.0 KiB if all is on the device" in said


def test_a_machine_is_told_in_words(tmp_path: Path) -> None:
    files.save(presets.find("rtx4090"), tmp_path / "machine.json")
    said = run("show", str(tmp_path / "machine.json"))
    assert "23.5 GiB" in said


def test_machines_lists_every_preset_with_its_rates_and_one_with_its_sources() -> None:
    lines = run("machines").splitlines()
    named = {line.split()[0]: line for line in lines}
    assert named.keys() >= {*presets.PRESETS, presets.THIS_MACHINE}
    assert max(map(len, lines)) <= 100
    # Memory and GB/s, Tflop/s of bf16, fp16, fp8 and fp32, host, link both ways, update, ring.
    assert named["rtx4090"].split()[1:] == (
        [
            "23.5",
            "GiB",
            "907",
            "159",
            "159",
            "317",
            "58",
            "59.6",
            "GiB",
            "67",
            "22",
            "22",
            "28",
            "-",
        ]
    )
    assert "a100-80" not in run("machines", "rtx4090")
    told = run("machines", "rtx4090", "--host-memory", "192GiB")
    assert "RTX 4090 data sheet" in told
    assert "192.0 GiB" in told


def test_calibrate_saves_a_machine_that_show_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = calibrate.Calibration(presets.find("rtx4090"), {1: 1e9}, ("memory is slow here",))
    monkeypatch.setattr(calibrate, "calibrate", lambda progress, device: measured)
    path = tmp_path / "machine.json"
    assert "memory is slow here" in run("calibrate", "-o", str(path))
    assert files.load(path, Machine) == presets.find("rtx4090")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not a whole JSON document"),
        ("[1]", "it does not say what kind it is; show reads plan, dataflow"),
        ('{"kind": "recipe"}', "kind is 'recipe'; show reads plan, dataflow"),
        ('{"kind": "plan", "format_version": 0, "data": {}}', "format_version is 0"),
    ],
)
def test_a_bad_file_is_one_line_of_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
    problem: str,
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    said = error_of(monkeypatch, capsys, "show", str(path))
    assert problem in said
    assert said.count("\n") == 1


def test_a_missing_file_is_one_line_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(monkeypatch, capsys, "show", str(tmp_path / "absent.json"))
    assert said == f"error: {tmp_path / 'absent.json'}: No such file or directory\n"


def test_a_machine_has_no_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    files.save(presets.find("rtx4090"), path)
    said = error_of(monkeypatch, capsys, "show", str(path), "--timeline", str(tmp_path / "x.png"))
    assert "give --timeline with a plan.json" in said


def test_reading_files_loads_no_torch(tmp_path: Path) -> None:
    files.save(PLAN, tmp_path / "plan.json")
    code = (
        "import sys; from cotrain_compile.cli.main import app; "
        f"app(['show', {str(tmp_path / 'plan.json')!r}], standalone_mode=False); "
        "app(['machines'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr or "torch was loaded"


JOB = """
import torch
from torch import nn


def build():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.randn(8, 16),)


def half_a_step():
    return lambda x: x
"""


def test_a_job_is_traced_and_analyzed_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    saved = tmp_path / "step.json"
    asked = ("--dynamic", "--checkpoints", "dissolve")
    said = run("trace", f"{tmp_path}/job.py:build", "-o", str(saved), *asked)
    assert "2 parameters can be updated on the host" in said
    dataflow = files.load(saved, Dataflow)
    assert 8 in dataflow.symbols.values()
    assert dataflow.checkpoints.dissolved
    assert {group.param for group in dataflow.updates} == {"weight", "bias"}
    said = run("analyze", str(saved), "--machine", "rtx4090", "--memory-budget", "1MiB")
    assert "budget 1.0 MiB" in said
    assert "weight (param)" in said
    (symbol,) = (name for name, size in dataflow.symbols.items() if size == 8)
    assert f"{symbol} (traced at 8) can grow to" in said


FAILING = """
def reading():
    return float(nn.Linear(2, 2).weight.detach().sum())


def failing():
    return {}["lr"]
"""


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("absent.py:build", "name an existing file and a function"),
        ("job.py", "name an existing file and a function"),
        ("job.py:absent", "has no function 'absent'"),
        ("job.py:half_a_stap", "has no function 'half_a_stap' (did you mean 'half_a_step'?)"),
        ("job.py:half_a_step", "must return (step, arguments)"),
        ("job.py:step_alone", "missing a required argument: 'x'; name a function that returns"),
        ("raising.py:build", "raising.py:3 raises KeyError: 'lr'; `python "),
        ("no_python.py:build", "no_python.py raises SyntaxError: "),
        ("job.py:reading", "DataDependentOutputException: aten._local_scalar_dense.default; tens"),
        ("job.py:failing", "raises KeyError: 'lr'; `python -c \"import job; job.failing()\"`"),
    ],
)
def test_a_wrong_job_is_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: str,
    expected: str,
) -> None:
    (tmp_path / "job.py").write_text(f"{JOB}\n\ndef step_alone(x): ...\n{FAILING}")
    (tmp_path / "raising.py").write_text('settings = {}\n\nrate = settings["lr"]\n')
    (tmp_path / "no_python.py").write_text("def build(:")
    said = error_of(monkeypatch, capsys, "trace", f"{tmp_path}/{job}", "-o", "unused.json")
    assert expected in said
    assert said.count("\n") == 1


EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.mark.parametrize(
    "job",
    [
        "gpt2.py:gpt2_124m",
        "llama.py:llama_1b",
        "llama.py:llama_7b",
        "llama.py:llama_13b",
        "llama.py:llama_70b",
    ],
)
def test_an_example_has_the_parameters_and_batch_that_it_states(job: str) -> None:
    build = load_job(f"{EXAMPLES}/{job}")
    with torch.device("meta"):
        step, (tokens,) = build()
    model = inspect.getclosurevars(step).nonlocals["model"]
    stated = inspect.getdoc(vars(sys.modules[job.partition(".")[0]])[job.partition(":")[2]])
    assert stated is not None
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\b[\d,]{6,}\b", stated)]
    assert numbers == [sum(parameter.numel() for parameter in model.parameters())]
    assert stated.endswith(f"batch {tokens.shape[0]} x {tokens.shape[1]}.")


MLP_JOB = """
import torch
from torch import nn


def build(width=64, last=nn.Linear):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), last(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (torch.ones(8, width),)


def wider():
    return build(width=128)


def without_bias():
    return build(last=lambda *sizes: nn.Linear(*sizes, bias=False))


def shorter():
    step, _ = build()
    return step, (torch.ones(4, 64),)
"""


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """A job, traced and solved: beside it are step.json and plan.json for 128 KiB."""
    job = tmp_path / "mlp.py"
    job.write_text(MLP_JOB)
    step, plan = str(tmp_path / "step.json"), str(tmp_path / "plan.json")
    run("trace", f"{job}:build", "-o", step)
    arguments = ("--machine", "rtx4090", "--memory-budget", "128KiB", "--policy", "zero-offload")
    run("solve", step, "-o", plan, *arguments)
    return job


def called(job: Path, function: str, **options: Any) -> tuple[Callable[..., Any], list[float]]:
    """The step that `function` of `job` builds, after two calls, and its losses."""
    plain, arguments = load_job(f"{job}:{function}")()
    torch.compiler.reset()
    step = torch.compile(plain, backend="cotrain", options=options)
    return step, [step(*arguments).item() for _ in range(2)]


def test_a_plan_solved_offline_is_the_one_that_runs(mlp: Path) -> None:
    path = mlp.with_name("plan.json")
    step, losses = called(mlp, "build", plan=str(path), memory_budget="128KiB")
    compiled = cotrain_compile.inspect(step)
    assert compiled.plan == files.load(path, Plan)
    assert set(compiled.plan.placement.updates.values()) == {UpdateMode.HOST_STREAMED}
    assert compiled.measured is not None
    peaks = compiled.measured.peak_bytes
    assert peaks[Tier.DEVICE] == compiled.plan.predicted.peak_bytes[Tier.DEVICE]
    _, unplaced = called(mlp, "build", policy="resident")
    assert losses == pytest.approx(unplaced, rel=1e-5)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("wider", r"other sizes: .* bytes in the plan, .* here\)"),
        pytest.param(
            "without_bias",
            r"parameters that only the plan updates: 2\.bias; tensors that only",
            marks=pytest.mark.long,
        ),
        ("shorter", "names agree, but shapes or arguments of ops differ"),
    ],
)
def test_a_plan_of_another_step_is_refused_with_what_differs(
    mlp: Path, function: str, expected: str
) -> None:
    with pytest.raises(PlanError, match=rf"made for another step .*{expected}.*solve this step"):
        called(mlp, function, plan=str(mlp.with_name("plan.json")))


def test_a_plan_for_more_memory_than_the_user_allows_is_refused(mlp: Path) -> None:
    path = str(mlp.with_name("plan.json"))
    with pytest.raises(PlanError, match=r"made for 128.0 KiB on the device.*is 120.0 KiB"):
        called(mlp, "build", plan=path, memory_budget="120KiB")
    with pytest.raises(PlanError, match=r"on the host.*again with --host-memory-budget 1048576"):
        called(mlp, "build", plan=path, host_memory_budget="1MiB")


def test_a_plan_that_contradicts_itself_is_refused_like_any_other(mlp: Path) -> None:
    path = mlp.with_name("plan.json")
    plan = files.load(path, Plan)
    files.save(replace(plan, tasks=plan.tasks[1:]), path)
    with pytest.raises(FormatError, match=r"comes after '.*', which is no task; solve the step"):
        called(mlp, "build", plan=str(path))


def test_a_plan_that_is_not_there_is_named(mlp: Path) -> None:
    with pytest.raises(OptionError, match=r"option 'plan' is .*absent.json': No such file"):
        called(mlp, "build", plan=str(mlp.with_name("absent.json")))
