"""How fast does the host update beside other people's kernels? DeepSpeed, torch and torchao.

One tensor of 1M, 10M and 100M parameters, AdamW, a gradient in float32 or bfloat16 as it arrives on
the host, float32 weights and states, one thread and two. All of them update the same tensors, in
turn within each round, so that they see the same caches and the same disturbances; a process of its
own for each number of threads. A kernel that takes no bfloat16 gradient for a float32 weight gets
it widened into a buffer that is kept, as its users do. torchao's keep the states in 8 bits: fewer
bytes, other numbers; on a CPU that takes hundreds of times as long, so only 1M parameters are
tried. Its `CPUOffloadOptimizer` needs a card; what it runs on the host is torch's
fused AdamW. The limit is a plain copy of as many bytes as the update has to touch. Of each the
median of the fastest fifth counts, since others may use the machine; all medians are there too.

Peers that are not installed are left out, and the report says so:
`DS_BUILD_CPU_ADAM=1 pip install --no-build-isolation ".[peers]"`, with torch and ninja there.

    python -m bench.runtime.host_update_peers -o bench/results/host_update_peers.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from bench.report import write_report
from bench.runtime.host_update import Case, Update, updates

Work = Callable[[], object]

COLUMNS = 4096
# 1M, 10M and 100M parameters.
ROWS, QUICK_ROWS = (256, 2560, 24576), (4,)
THREADS = (1, 2)
REPEATS, QUICK_REPEATS = 20, 2
TORCHAO_PARAMETERS = ROWS[0] * COLUMNS
PEERS = ("deepspeed", "torchao")
# Read: gradient, weight and both states; written: all but the gradient.
STATE_BYTES = 24
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def one_tensor(rows: int, low_precision: bool) -> Update:
    """Our update of a `rows` x `COLUMNS` weight, with its tensors."""
    case = Case(
        "one tensor",
        # The first layer is the small one that a kernel is compared on before it is trusted.
        lambda: nn.Sequential(
            nn.Linear(8, COLUMNS, bias=False), nn.Linear(COLUMNS, rows, bias=False)
        ),
        lambda: torch.randn(2, 8),
        low_precision,
        prefix="1.",
    )
    (update,) = updates(case)
    return update


def kernels(update: Update) -> dict[str, Work]:
    """Everything that is installed and updates the tensors of `update`, by name."""
    found: dict[str, Work] = {
        "ours": update.ours,
        "torch fused": _optimizer(update, partial(torch.optim.AdamW, fused=True)),
        "torch foreach": _optimizer(update, partial(torch.optim.AdamW, foreach=True)),
    }
    if "deepspeed" in installed():
        found["DeepSpeed"] = _optimizer(update, _deepspeed)
    if "torchao" in installed() and update.param.numel() <= TORCHAO_PARAMETERS:
        found["torchao, 8-bit states"] = _torchao(update)
    return found


def installed() -> dict[str, str]:
    """Versions of the peers that can be imported here."""
    return {
        name: importlib.metadata.version(name)
        for name in PEERS
        if importlib.util.find_spec(name) is not None
    }


def _optimizer(update: Update, make: Callable[..., torch.optim.Optimizer]) -> Work:
    """The step of an optimizer that keeps the parameter and states of `update`."""
    param = nn.Parameter(update.param, requires_grad=True)
    assert param.data_ptr() == update.param.data_ptr()
    optimizer = make([param], **SETTINGS)
    _, exp_avg, exp_avg_sq = update.states
    optimizer.state[param] = {"step": 1, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.state[param]["step"] = torch.tensor(1.0)
    return _with_gradient(update, param, optimizer)


def _with_gradient(update: Update, param: nn.Parameter, optimizer: Any) -> Work:
    if update.gradient.dtype == param.dtype:
        param.grad = update.gradient.view_as(param)
        return lambda: optimizer.step()
    widened = param.grad = torch.zeros_like(param)

    def widen_and_step() -> None:
        widened.copy_(update.gradient)
        optimizer.step()

    return widen_and_step


def _deepspeed(params: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam(params, adamw_mode=True, **settings)
    return made


def _torchao(update: Update) -> Work:
    from torchao.optim import AdamW8bit

    param = nn.Parameter(update.param)
    return _with_gradient(update, param, AdamW8bit([param], **SETTINGS))


# Measuring.


def measure(rows: int, low_precision: bool, repeats: int) -> dict[str, Any]:
    """Seconds of every kernel, the copy's limit, and how often as fast as each peer we are."""
    update = one_tensor(rows, low_precision)
    count = update.param.numel()
    source, target = torch.ones(count), torch.empty(count)
    works: dict[str, Work] = {"copy": lambda: target.copy_(source), **kernels(update)}
    seconds = in_turn(works, repeats)
    touched = STATE_BYTES + update.gradient.element_size()
    # A copy reads and writes 4 bytes for each float.
    seconds["limit"] = [copy_s * touched / 8 for copy_s in seconds.pop("copy")]
    quiet_s = {name: quiet_median(values) for name, values in seconds.items()}
    return {
        "parameters": count,
        "gradient": str(update.gradient.dtype).removeprefix("torch."),
        "seconds": {
            name: {"quiet_median": quiet_s[name], **_spread(values)}
            for name, values in seconds.items()
        },
        "ours_against": {
            name: value / quiet_s["ours"] for name, value in quiet_s.items() if name != "ours"
        },
    }


def quiet_median(values: Sequence[float]) -> float:
    """The median of the fastest fifth: what a work takes while nobody else uses the machine."""
    return statistics.median(sorted(values)[: max(1, len(values) // 5)])


def in_turn(works: Mapping[str, Work], repeats: int) -> dict[str, list[float]]:
    """Wall seconds of each work, round by round in changing order, after two to warm up."""
    found: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(-2, repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            works[name]()
            seconds = time.perf_counter() - began
            if number >= 0:
                found[name].append(seconds)
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# Running.


def records_in_process(threads: int, quick: bool) -> list[dict[str, Any]]:
    """Every size and gradient in a process in which all libraries have `threads` threads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        command = [
            sys.executable,
            "-m",
            "bench.runtime.host_update_peers",
            "--worker",
            "-o",
            str(path),
        ]
        threaded = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*command, *(["--quick"] if quick else [])], check=True, env=threaded)
        found: list[dict[str, Any]] = json.loads(path.read_text())
    return [{"threads": threads, **record} for record in found]


def work_here(path: Path, quick: bool) -> None:
    """Measure all sizes and gradients with the threads this process was started with."""
    repeats = QUICK_REPEATS if quick else REPEATS
    found = [
        measure(rows, low_precision, repeats)
        for rows in (QUICK_ROWS if quick else ROWS)
        for low_precision in (False, True)
    ]
    path.write_text(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure with each number of threads, print a line for each record, and write the report."""
    question = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--quick", action="store_true", help="tiny tensors, two rounds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work_here(given.output, given.quick)
        return
    console, records = Console(soft_wrap=True), []
    for threads in given.threads:
        records += records_in_process(threads, given.quick)
    for record in records:
        console.print(line(record))
    result = {"repeats": REPEATS, "peers": installed(), "records": records}
    write_report(given.output, question, result)


def line(record: Mapping[str, Any]) -> str:
    """One record as text: milliseconds of each kernel."""
    told = (f"{name} {1e3 * s['quiet_median']:.2f}" for name, s in record["seconds"].items())
    size = f"{record['parameters'] / 1e6:.0f}M {record['gradient']}, {record['threads']} threads"
    return f"{size:28}{', '.join(told)} ms"


if __name__ == "__main__":
    main()
