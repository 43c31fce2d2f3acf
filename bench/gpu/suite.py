"""Does it work on this card, and how fast? Every mode of placement, on one GPU, in one table.

    python -m bench.gpu.suite -o bench/results/gpu_suite.json
    python -m bench.gpu.suite --quick -o bench/results/gpu_suite.json        about 3 minutes
    python -m bench.gpu.suite --device cpu --size tiny -o /tmp/suite.json    no GPU needed

First the machine is calibrated. Then each policy trains a small GPT, and what it leaves is compared
with what stays resident. Then a step of a large GPT, built on the CPU, is captured once and placed
in many ways: seconds and peak as predicted (the calibrated machine, with a profile of the resident
step where that fits) and as measured. The peers of `bench.gpu.peers` then train the same GPT, and
last is the largest model that each trains as if the card had less memory (`bench.gpu.largest`). A
row that fails has its error; the file is written after every row. Rows for which no time is left
say so: `--only` runs some of the tables.

Without network: bring wheels of pulp, highspy, pydantic, pydantic_core, annotated_types and
typing_inspection (`pip download --no-deps --python-version 3.12 --only-binary=:all: ...`) and put
them on PYTHONPATH. Without pulp there are no integer programs: rows of `auto` are left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.largest import CAPS_BYTES, LAYERS, ways
from bench.gpu.largest import row as largest_row
from bench.gpu.measure import measured
from bench.gpu.model import SIZES, Size, Training
from bench.gpu.peers import PEERS, Peer
from bench.gpu.placer import Placer, foretold
from bench.report import write_report
from cotrain_compile import files
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.support.units import Size as MemorySize

RULES = ("resident", "streamed", "coarse", "fraction:0.5", "zero-offload")
BUDGETS = (0.8, 0.6, 0.45)
# The tables, and up to which part of the time each may begin another row.
TABLES = {"correctness": 0.3, "performance": 0.6, "peers": 0.7, "largest": 1.0}
GIB = 2**30
Row = dict[str, Any]
HAS_PULP = importlib.util.find_spec("pulp") is not None


class Suite:
    """Runs rows one after the other, prints each, and writes the file after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device: str = arguments.device
        self.output: Path = arguments.output
        self.quick: bool = arguments.quick
        self.began_s = time.monotonic()
        self.limit_s = 60 * (arguments.minutes or (3 if self.quick else 9))
        self.result: dict[str, Any] = {table: [] for table in arguments.only}

    def add(self, table: str, name: str, work: Callable[[], Row]) -> Row:
        """The row that `work` returns, or its error."""
        row: Row = {"name": name}
        started = time.monotonic()
        if started > self.began_s + TABLES[table] * self.limit_s:
            row["error"] = "no time left"
        else:
            try:
                row |= work()
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:600]
        row["row_s"] = round(time.monotonic() - started, 1)
        self.result[table].append(row)
        print(_line(row), flush=True)
        self.write()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return row

    def write(self) -> None:
        """Everything so far, as one document."""
        write_report(self.output, (__doc__ or "").splitlines()[0], self.result)


def main(given: Sequence[str] | None = None) -> None:
    """Run the suite; see above."""
    arguments = _arguments(given)
    suite = Suite(arguments)
    if not HAS_PULP:
        print("pulp is missing: no integer programs, so rows of auto are left out")
    machine = _calibrated(suite) if "performance" in arguments.only else None
    size = arguments.size or _largest(suite)
    if "correctness" in arguments.only:
        _heading("correctness: a small GPT, four steps, against resident")
        _correctness(suite)
    if machine is not None:
        _heading(f"performance: GPT {size}, {SIZES[size].parameters / 1e9:.2f} G parameters")
        _performance(suite, size, machine)
    if "peers" in arguments.only:
        _heading(f"peers: GPT {size}")
        _peers(suite, size)
    if "largest" in arguments.only:
        _heading("the largest model at capped memory")
        _largest_models(suite)
    suite.write()
    rows = [row for table in arguments.only for row in suite.result[table]]
    print(f"{sum('error' in row for row in rows)} of {len(rows)} rows have errors")


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=cuda)
    parser.add_argument("--size", choices=tuple(SIZES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, help="no new row after so many")
    parser.add_argument("--only", nargs="+", choices=tuple(TABLES), default=tuple(TABLES))
    return parser.parse_args(given)


def _largest(suite: Suite) -> str:
    """The largest GPT whose 16 bytes a parameter, doubled for activations, fit the card."""
    if suite.device == "cpu":
        return "tiny"
    capacity = torch.cuda.get_device_properties(0).total_memory
    names = ("350m", "1b") if suite.quick else ("350m", "1b", "3b", "7b")
    fitting = [name for name in names if 32 * SIZES[name].parameters <= capacity]
    return fitting[-1] if fitting else "350m"


def _calibrated(suite: Suite) -> Machine | None:
    """This computer measured; the figures become part of the result."""
    tiny = suite.device == "cpu"
    small = Sizes(copy_bytes=2**22, matmul_side=256, updated_parameters=2**18, repeats=3)
    large = Sizes(copy_bytes=2**28, matmul_side=4096, updated_parameters=2**25, repeats=5)
    try:
        found = calibrate(None, suite.device, small if tiny else large)
    except Exception as error:
        suite.result["calibration"] = {"error": f"{type(error).__name__}: {error}"}
        print(f"calibration failed: {error}")
        return None
    machine = found.machine
    suite.result["calibration"] = {
        "h2d_bytes_per_s": machine.h2d.bytes_per_s,
        "d2h_bytes_per_s": machine.d2h.bytes_per_s,
        "duplex": machine.duplex,
        "host_update_bytes_per_s": dict(found.host_update_bytes_per_s),
        "slowdown_while_copying": machine.host_update.slowdown_while_copying,
        "device_flops_per_s": dict(machine.device.flops_per_s),
        "device_bytes_per_s": machine.device.bytes_per_s,
        "launch_s": machine.device.launch_s,
        "remarks": found.remarks,
    }
    rates = {
        "up": machine.h2d.bytes_per_s,
        "down": machine.d2h.bytes_per_s,
        "host update": machine.host_update.bytes_per_s,
        "device memory": machine.device.bytes_per_s,
    }
    told = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    print(f"{told}, duplex {machine.duplex:.2f}")
    return machine


# Correctness.


def _correctness(suite: Suite) -> None:
    expected: list[torch.Tensor] = []
    suite.add("correctness", "resident", lambda: _trained(suite, expected, "resident"))
    for policy in RULES[1:]:
        suite.add("correctness", policy, partial(_trained, suite, expected, policy))
    suite.add(
        "correctness",
        "model left on the CPU",
        lambda: _trained(suite, expected, "streamed", built_on="cpu"),
    )


def _trained(
    suite: Suite, expected: list[torch.Tensor], policy: str, built_on: str | None = None
) -> Row:
    """Train through `torch.compile`; the first result becomes the expected one."""
    torch._dynamo.reset()
    training = Training(SIZES["tiny"], suite.device, built_on=built_on)
    options: dict[str, Any] = {"policy": policy, "host_kernels": "captured"}
    if suite.device == "cuda":
        options["device"] = "cuda"
    step = torch.compile(training.step, backend="cotrain", options=options)
    torch.manual_seed(1)
    losses = [step(*training.batch()).detach().cpu() for _ in range(4)]
    found = [*losses, *(t.detach().cpu().clone() for t in training.tensors().values())]
    if not expected:
        expected.extend(found)
    pairs = list(zip(found, expected, strict=True))
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    return {
        "bitwise": all(torch.equal(a, b) for a, b in pairs),
        "worst_difference": worst,
        "loss": float(losses[-1]),
    }


# Performance.


class Placed:
    """The captured GPT, and the machine that its plans are for: as measured."""

    def __init__(self, suite: Suite, size: str, machine: Machine) -> None:
        self.suite = suite
        training = Training(SIZES[size], suite.device, built_on="cpu")
        self.placer = Placer(training.step, training.batch(), suite.device)
        self.machine_file = suite.output.with_suffix(".machine.json")
        files.save(machine, self.machine_file)
        self.machine = machine
        print(f"captured {len(self.placer.dataflow.ops)} ops in {self.placer.traced_s:.0f} s")

    def row(self, policy: str, budget_bytes: int | None = None) -> Row:
        """Place the step by `policy` within a budget, run it, and compare."""
        values = self.placer.values
        started = time.monotonic()
        run = self.placer.compiled(
            policy=policy,
            memory_budget=MemorySize(nbytes=budget_bytes) if budget_bytes else None,
            machine=str(self.machine_file),
            work_limit=10.0 if self.suite.quick else 20.0,
        )
        run(list(values))
        prepared_s = time.monotonic() - started
        run(list(values))
        repeats = 2 if self.suite.quick else 4
        timed_row = measured(lambda: run(list(values)), self.suite.device, repeats)
        timeline = run.compiled.measured
        assert timeline is not None
        return {
            **foretold(run.compiled),
            "measured_peak_bytes": timeline.peak_bytes[Tier.DEVICE],
            "prepared_in_s": round(prepared_s, 1),
            **timed_row,
        }


def _performance(suite: Suite, size: str, machine: Machine) -> None:
    placers: list[Placed] = []
    suite.add("performance", "capture", lambda: _captured(placers, suite, size, machine))
    if not placers:
        return
    placer = placers[0]
    resident = suite.add("performance", "resident", lambda: placer.row("resident"))
    for policy in RULES[1:]:
        suite.add("performance", policy, partial(placer.row, policy))
    if not HAS_PULP:
        return
    whole = resident.get("predicted_peak_bytes") or _resident_bytes(placer)
    for share in BUDGETS[:2] if suite.quick else BUDGETS:
        name = f"auto at {share:.0%} of resident"
        suite.add("performance", name, partial(placer.row, "auto", int(share * whole)))


def _captured(placers: list[Placed], suite: Suite, size: str, machine: Machine) -> Row:
    placers.append(Placed(suite, size, machine))
    ops = len(placers[0].placer.dataflow.ops)
    return {"ops": ops, "parameters": SIZES[size].parameters}


def _resident_bytes(placed: Placed) -> int:
    """What the resident step needs, which has not run."""
    return placed.placer.plan(placed.machine, "resident").predicted.peak_bytes[Tier.DEVICE]


# Peers.


def _peers(suite: Suite, size: str) -> None:
    for peer in PEERS:
        suite.add("peers", peer.name, partial(_peer, suite, peer, SIZES[size]))


def _peer(suite: Suite, peer: Peer, size: Size) -> Row:
    """A peer's step, timed; the second run has made all states."""
    if reason := peer.missing(suite.device):
        return {"error": reason}
    torch._dynamo.reset()
    with peer.session(size, suite.device) as step:
        batch = size.batch(suite.device)
        for _ in range(2):
            step(*batch)
        found = measured(lambda: step(*batch), suite.device, 2 if suite.quick else 4)
    return {"remark": peer.remark, **found}


def _largest_models(suite: Suite) -> None:
    layers = LAYERS[:3] if suite.quick else LAYERS
    for cap_bytes in CAPS_BYTES[:1] if suite.quick else CAPS_BYTES:
        policy = "auto" if HAS_PULP else "streamed"
        for name, session in ways(suite.device, cap_bytes, policy).items():
            work = partial(largest_row, suite.device, cap_bytes, session, layers)
            suite.add("largest", f"{name}, {cap_bytes // GIB} GiB", work)


# What is printed.


def _heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def _line(row: Mapping[str, Any]) -> str:
    name, rest = f"{row['name']:26}", ""
    if "error" in row:
        rest = f"ERROR {row['error'].splitlines()[0][:110]}"
    elif "bitwise" in row:
        same = "equal to the bit" if row["bitwise"] else f"differs by {row['worst_difference']:.2g}"
        rest = f"{same}, loss {row['loss']:.4f}"
    elif "tried" in row:
        rest = f"{row['parameters'] / 1e9:.1f} G parameters, {row['layers']} layers"
    elif "predicted_s" not in row and "measured_s" in row:
        peak = row.get("allocator_peak_bytes", 0) / GIB
        rest = f"{row['measured_s']:8.3f} s  peak {peak:6.2f} GiB  {row['remark']}"
    elif "measured_s" in row:
        rest = (
            f"{row['measured_s']:8.3f} s (predicted {row['predicted_s']:8.3f})  peak "
            f"{row['measured_peak_bytes'] / GIB:6.2f} GiB (predicted "
            f"{row['predicted_peak_bytes'] / GIB:6.2f})  host {row['host_bytes'] / GIB:6.2f} GiB  "
            f"down {row['offloaded_bytes'] / GIB:5.2f}  up {row['fetched_bytes'] / GIB:5.2f}"
        )
    return f"{name}{rest}  [{row['row_s']} s]"


if __name__ == "__main__":
    main()
