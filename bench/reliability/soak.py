"""Does a long run stay flat? Memory on both tiers, step time and numbers, over thousands of steps.

python -m bench.reliability.soak --steps 5000 -o bench/results/soak.json

A small model trains with batches of three sizes, a checkpoint that is saved and loaded, and
evaluations in between; the same loop runs in eager beside it, on the same batches.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import math
import os
import resource
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import cotrain_compile
from bench.report import write_report
from cotrain_compile.machine import Tier

ROWS = (8, 16, 12)
WIDTH, CLASSES = 32, 8
EVALUATE_EVERY, CHECKPOINT_EVERY = 51, 200
# glibc counts as given out what each thread keeps for its next request, and gives each thread
# memory that it never returns: neither is anybody's, both grow for thousands of steps.
WITHOUT_CACHES = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"
# Of 100 slopes of a flat run, 5 lie outside this many standard errors.
CONFIDENCE = 1.96
OPTIONS: dict[str, Any] = {
    "policy": "zero-offload",
    "host_kernels": "captured",
    "overlap_steps": True,
    "quiet": True,
}


@dataclass
class Loop:
    """A model in training; `step` is the step function, compiled or not."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor, Tensor], Tensor]

    def evaluate(self, x: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            result: Tensor = self.model(x)
        self.model.train()
        return result

    def save_and_load(self) -> None:
        """A checkpoint is written, the run goes astray for a step, and the checkpoint is loaded."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "at": self.optimizer.state_dict()}, file)
        with torch.no_grad():
            for param in self.model.parameters():
                param.add_(1.0)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["at"])


@dataclass
class Course:
    """What was measured after each step, or each evaluation.

    All has its memory from the beginning, so that none of it counts as growth.
    """

    cpu_s: array[float]
    device_bytes: array[int]
    host_bytes: array[int]
    live_tensors: array[int]
    allocated_bytes: array[int]
    resident_bytes: array[int]


def blank_course(steps: int) -> Course:
    """Room for what `steps` steps are measured by."""
    evaluations = steps // EVALUATE_EVERY
    return Course(array("d", [0.0]) * steps, *(array("q", [0]) * evaluations for _ in range(5)))


class Mallinfo2(ctypes.Structure):
    """What glibc (2.33 or newer) tells of its memory, by glibc's names."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


# Made once: every one has a class of its own, which would count as growth.
C_LIBRARY = ctypes.CDLL(None)
C_LIBRARY.mallinfo2.restype = Mallinfo2


@dataclass(frozen=True)
class Slope:
    """Of a straight line through a course, in its unit for each step, with its standard error."""

    per_step: float
    error: float

    @property
    def is_flat(self) -> bool:
        """No growth that the scatter of the points leaves room to believe in."""
        return self.per_step <= CONFIDENCE * self.error


def slope(values: Sequence[float], steps_apart: int = 1) -> Slope:
    """Least squares; the error supposes that the points scatter on their own."""
    fit = statistics.linear_regression(range(len(values)), values)
    left = [y - fit.intercept - fit.slope * x for x, y in enumerate(values)]
    spread = statistics.pvariance(range(len(values))) * len(values)
    error = math.sqrt(sum(r * r for r in left) / max(1, len(values) - 2) / spread)
    return Slope(fit.slope / steps_apart, error / steps_apart)


def make_loop(compile_with: Callable[..., Any] | None) -> Loop:
    """The same model from the same start, in float64, so that eager is near."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Loop(model, optimizer, compile_with(step) if compile_with else step)


def soak(steps: int) -> dict[str, Any]:
    """Train `steps` steps twice, side by side, and say how flat the placed run was."""
    torch._dynamo.reset()
    counters.clear()
    ours = make_loop(lambda step: torch.compile(step, backend="cotrain", options=OPTIONS))
    eager = make_loop(None)
    draw = torch.Generator().manual_seed(1)
    course, farthest = blank_course(steps), 0.0
    for i in range(steps):
        x = torch.randn(ROWS[i % len(ROWS)], WIDTH, dtype=torch.float64, generator=draw)
        y = x[:, :CLASSES].argmax(1)
        start_s = time.process_time()  # of all threads: what else runs here does not count
        loss = ours.step(x, y)
        course.cpu_s[i] = time.process_time() - start_s
        farthest = max(farthest, float((loss - eager.step(x, y)).abs()))
        if i % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            farthest = max(farthest, float((ours.evaluate(x) - eager.evaluate(x)).abs().max()))
            note(course, i // EVALUATE_EVERY, cotrain_compile.inspect(ours.step))
        if i % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            ours.save_and_load()
            eager.save_and_load()
    return verdict(course, steps, farthest, ours, eager)


def note(course: Course, evaluation: int, compiled: Any) -> None:
    """The bytes and tensors alive now."""
    cotrain_compile.synchronize()
    peaks = compiled.measured.peak_bytes
    course.device_bytes[evaluation] = peaks[Tier.DEVICE]
    course.host_bytes[evaluation] = peaks[Tier.HOST]
    gc.collect()
    live = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    course.live_tensors[evaluation] = live
    course.allocated_bytes[evaluation] = allocated_bytes()
    # What the C library has freed and keeps for later is nobody's.
    C_LIBRARY.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    course.resident_bytes[evaluation] = pages * resource.getpagesize()


def allocated_bytes() -> int:
    """What the C library has given out, to Python and to torch, and not got back."""
    told = C_LIBRARY.mallinfo2()
    return int(told.uordblks + told.hblkhd)


def verdict(course: Course, steps: int, farthest: float, ours: Loop, eager: Loop) -> dict[str, Any]:
    """Figures of the second half for memory, as the first is where caches fill; all for time."""
    half = len(course.resident_bytes) // 2
    fifth = max(1, steps // 5)
    names = ("device_bytes", "host_bytes", "live_tensors", "allocated_bytes", "resident_bytes")
    kept = {name: getattr(course, name)[half:] for name in names}
    slopes = {name: slope(values, EVALUATE_EVERY) for name, values in kept.items()}
    first, last = course.cpu_s[fifth : 2 * fifth], course.cpu_s[-fifth:]
    pairs = zip(ours.model.parameters(), eager.model.parameters(), strict=True)
    return {
        "steps": steps,
        "rows": ROWS,
        "graphs": counters["stats"]["unique_graphs"],
        "evaluations": len(course.resident_bytes),
        "checkpoints": steps // CHECKPOINT_EVERY,
        "slopes_per_step": {n: asdict(s) | {"is_flat": s.is_flat} for n, s in slopes.items()},
        "growth_of_second_half": {name: values[-1] - values[0] for name, values in kept.items()},
        "median_step_cpu_s": statistics.median(course.cpu_s),
        "last_fifth_over_second": statistics.median(last) / statistics.median(first),
        "largest_difference_of_losses": farthest,
        "largest_difference_of_parameters": max(
            float((a - b).detach().abs().max()) for a, b in pairs
        ),
    }


def main() -> None:
    """Run it and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    if os.environ.get("GLIBC_TUNABLES") != WITHOUT_CACHES:
        environment = {**os.environ, "GLIBC_TUNABLES": WITHOUT_CACHES}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    start_s = time.monotonic()
    result = soak(asked.steps)
    result["minutes"] = round((time.monotonic() - start_s) / 60, 1)
    write_report(asked.output, (__doc__ or "").splitlines()[0], result)
    print(result)


if __name__ == "__main__":
    main()
