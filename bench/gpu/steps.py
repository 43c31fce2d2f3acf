"""How true is what is predicted of this card? Steps that people train, run and predicted.

    python -m bench.gpu.steps -o bench/results/gpu_steps.json
    python -m bench.gpu.steps --device cpu --tiny -o /tmp/steps.json    no GPU needed

Each step runs in eager, then once captured and placed: resident, by the rules, and by `auto` in
parts of what resident takes. A row has seconds and the allocator's peak as measured, and both as
predicted by the card's preset and by a calibration. The kernels of eager steps are told by kind.

Steps are prepared in processes beside each other, since compiling takes processors; of what is
timed one is on the card at a time. Others may compile meanwhile, so that a step whose host is busy
takes longer than alone: the seconds of its kernels do not.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.measure import measured
from bench.gpu.placer import Placer, foretold
from bench.published.models import Build, decoder_step, llama_step, timm_step
from bench.report import write_report
from cotrain_compile import files
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.support.units import Size

STEPS: dict[str, Build] = {
    "GPT-2 124M, 12 × 1024": decoder_step(768, 12, 12, 12, 1024),
    "Llama 1.1B bfloat16, 4 × 2048": llama_step("tiny", 22, 4, 2048),
    "Llama 1.1B in checkpoints, 8 × 2048": llama_step("tiny", 22, 8, 2048, checkpointed=True),
    "ResNet-50 channels last, 128": timm_step("resnet50", 128, last=True),
    "ViT-B/16, 64": timm_step("vit_base_patch16_224", 64, fused_attention=True, adamw=True),
}
TINY: dict[str, Build] = {"GPT tiny": decoder_step(64, 4, 2, 2, 64)}
# A name, a policy, a part of what the resident plan takes, and settings of Inductor.
WAYS: tuple[tuple[str, str, float | None, dict[str, Any]], ...] = (
    ("resident", "resident", None, {}),
    ("auto at 60 % of resident", "auto", 0.6, {}),
    ("auto at 35 % of resident", "auto", 0.35, {}),
    ("zero-offload", "zero-offload", None, {}),
    ("streamed", "streamed", None, {}),
    ("resident, sums as Triton likes", "resident", None, {"emulate_precision_casts": False}),
)
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "convolution": ("conv", "wgrad", "dgrad", "fprop"),
    "product": ("gemm", "nvjet", "cutlass", "xmma", "splitK"),
}
Row = dict[str, Any]


def main(given: Sequence[str] | None = None) -> None:
    """Run all steps in processes of their own, or one of them in this."""
    arguments = _arguments(given)
    if arguments.only is not None:
        _one(arguments)
        return
    calibrated = arguments.machine or arguments.output.with_suffix(".machine.json")
    if arguments.machine is None:
        files.save(calibrate(None, arguments.device).machine, calibrated)
    names = list(TINY if arguments.tiny else STEPS)
    if arguments.steps is not None:
        names = [names[number] for number in arguments.steps]
    parts = [arguments.output.with_suffix(f".{n}.json") for n in range(len(names))]
    rest = ["--device", arguments.device, "--machine", str(calibrated)]
    rest += ["--seconds", str(arguments.seconds), *(["--tiny"] if arguments.tiny else [])]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.steps", "--only", name, "-o", str(part), *rest]
        )
        for name, part in zip(names, parts, strict=True)
    ]
    for child in children:
        child.wait()
    rows = [row for part in parts if part.exists() for row in json.loads(part.read_text())]
    write_report(arguments.output, (__doc__ or "").splitlines()[0], {"rows": rows})
    for part in parts:
        part.unlink(missing_ok=True)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=cuda)
    parser.add_argument("--tiny", action="store_true", help="small steps, to try the script")
    parser.add_argument("--seconds", type=float, default=600, help="no new row after so many")
    parser.add_argument("--steps", nargs="+", type=int, help="numbers of steps; all if left out")
    parser.add_argument("--only", help="one step, in this process")
    parser.add_argument("--machine", type=Path, help="a calibrated machine; measured if left out")
    return parser.parse_args(given)


# One step.


class OneStep:
    """A step built on its device: in eager, and captured once to be placed in many ways."""

    def __init__(self, build: Build, device: str, calibrated: Machine) -> None:
        self.device, self.calibrated = device, calibrated
        torch.manual_seed(0)
        with torch.device(device):
            self.step, self.arguments = build()
        self.resident_bytes = 0

    def eager(self) -> Row:
        """The step as the user wrote it, after two that make its states."""
        return self._as_written(self.step)

    def stock(self) -> Row:
        """`torch.compile` of the whole step, as it comes."""
        torch._dynamo.reset()
        return self._as_written(torch.compile(self.step))

    def _as_written(self, step: Callable[..., Any]) -> Row:
        def run() -> None:
            step(*self.arguments)

        for _ in range(2):
            run()
        with alone():
            row = measured(run, self.device, 5)
            if self.device == "cuda":
                row |= {"kernels": kernels_of(run)}
        return row

    def capture(self) -> Row:
        """Trace the step; nothing is run."""
        self.placer = Placer(self.step, self.arguments, self.device)
        plan = self.placer.plan(self.calibrated, "resident")
        self.resident_bytes = plan.predicted.peak_bytes[Tier.DEVICE]
        return {"traced_s": self.placer.traced_s, "ops": len(self.placer.dataflow.ops)}

    def placed(self, policy: str, share: float | None, settings: dict[str, Any]) -> Row:
        """Place the step, run it, and compare with what is predicted of it."""
        budget = int(share * self.resident_bytes) if share else None
        size = Size(nbytes=budget) if budget else None
        began = time.monotonic()
        run = self.placer.compiled(
            policy=policy, memory_budget=size, inductor=settings or None, quiet=True
        )
        values = self.placer.values
        run(list(values))
        prepared_s = time.monotonic() - began

        def call() -> None:
            run(list(values))

        with alone():
            call()
            row = measured(call, self.device, 5)
            if self.device == "cuda":
                row |= {"kernels": kernels_of(call)}
        plan = self.placer.plan(self.calibrated, policy, budget)
        return row | {
            **foretold(run.compiled),
            "calibrated_s": plan.predicted.makespan_s,
            "prepared_s": prepared_s,
        }


def _one(arguments: argparse.Namespace) -> None:
    """The rows of one step, written after each."""
    until_s = time.monotonic() + arguments.seconds
    build = (TINY if arguments.tiny else STEPS)[arguments.only]
    one = OneStep(build, arguments.device, files.load(arguments.machine, Machine))
    work: list[tuple[str, Callable[[], Row]]] = [("eager", one.eager), ("capture", one.capture)]
    for name, policy, share, settings in WAYS:
        work.append((name, partial(one.placed, policy, share, settings)))
    work.insert(3, ("torch.compile", one.stock))
    rows: list[Row] = []
    for name, run in work:
        row: Row = {"step": arguments.only, "way": name}
        try:
            if time.monotonic() > until_s:
                raise TimeoutError("no time left")
            row |= run()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:1500]
        rows.append(row)
        print(_line(row), flush=True)
        arguments.output.write_text(json.dumps(rows))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nobody else measures while the body runs."""
    lock: TextIO
    with open("/tmp/cotrain_gpu_steps.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kernels_of(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the kernels of one run by kind, and of the dearest by their names."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type.name == "CUDA":
            seconds = 1e-6 * (event.time_range.end - event.time_range.start)
            kinds[_kind_of(event.name)] += seconds
            names[event.name[:90]] += seconds
    return {**kinds, **{f"kernel {name}": s for name, s in names.most_common(12)}}


def _kind_of(kernel: str) -> str:
    told = (kind for kind, words in KINDS.items() if any(word in kernel for word in words))
    return next(told, "memory")


def _line(row: Row) -> str:
    told = f"{row['step']:38}{row['way']:32}"
    if "error" in row:
        return f"{told}ERROR {row['error'][:200]}"
    if "measured_s" not in row:
        return f"{told}{row['ops']} ops in {row['traced_s']:.0f} s"
    told += f"{1e3 * row['measured_s']:9.1f} ms"
    if "allocator_peak_bytes" in row:
        told += f" {row['allocator_peak_bytes'] / 2**30:6.2f} GiB, busy {row['busy']:.2f}"
    if "predicted_s" in row:
        again = row["calibrated_s"]
        told += f"; predicted {1e3 * row['predicted_s']:.1f} ms"
        told += f" (calibrated {1e3 * again:.1f})" if again else ""
        told += (
            f", {row['predicted_peak_bytes'] / 2**30:.2f} GiB; ready in {row['prepared_s']:.0f} s"
        )
    if "kernels" in row:
        kinds = {k: f"{1e3 * s:.1f}" for k, s in row["kernels"].items() if k[:7] != "kernel "}
        told += f" {kinds}"
    return told


if __name__ == "__main__":
    main()
