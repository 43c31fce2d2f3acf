"""What does a placed step cost beyond its kernels? Microseconds a node and a task, on tiny tensors.

A GPT of 24 layers and width 8, on one thread: what its kernels compute is next to nothing, so that
a step takes what Python and ATen's dispatch take. Ours is measured resident and with every update
on the host, with ATen's kernels and with Inductor's; beside it are the same step in eager PyTorch
and `fx.Interpreter` on the captured graph. All take turns in one process; a side counts with the
least of its rounds. A step is what the user calls, with Dynamo's guards; that of `fx.Interpreter`
is without. The time of a task has what the step waits for the threads of the emulated device, which
take turns with it in Python.

    python -m bench.runtime.overhead -o bench/results/overhead.json

`--profile SIDE` shows where the time of one side goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import fx, nn

import cotrain_compile
from bench.report import write_report
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.model import CharacterGPT, Shape
from cotrain_compile.runtime.ops import TASKS

SHAPE = Shape(characters=16, context=8, width=8, layers=24, heads=2)
ROUNDS, STEPS = 9, 3
SIDES: dict[str, dict[str, Any] | None] = {
    "eager PyTorch": None,
    "eager lowering, resident": {"policy": "resident"},
    "eager lowering, updates on the host": {"policy": "coarse"},
    "inductor lowering, resident": {"policy": "resident", "lowering": "inductor"},
    "inductor lowering, updates on the host": {"policy": "coarse", "lowering": "inductor"},
}
INTERPRETER = "fx.Interpreter"


@dataclass(frozen=True)
class Side:
    """A step to time; `placed` is None where this package does not run it."""

    run: Callable[[], object]
    placed: CompiledStep | None = None

    @property
    def calls(self) -> int:
        """Ops and compiled segments that a step runs, tasks and waits not counted."""
        if self.placed is None:
            return 0
        lowered, graph = self.placed.lowered, self.placed.graph
        step = graph if lowered is None else lowered.segmented.step
        nodes = [node for node in step.module.graph.nodes if node.op.startswith("call")]
        return sum(node.target not in TASKS for node in nodes)


def new_side(options: dict[str, Any] | None) -> Side:
    """A side that has run once; without `options` in eager."""
    torch.manual_seed(0)
    model = CharacterGPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    characters = torch.randint(SHAPE.characters, (1, SHAPE.context + 1))

    def step(characters: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(characters[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    if options is None:
        return Side(lambda: step(characters))
    shared = {"quiet": True, "poison": False, "time_limit": 5.0}
    compiled = torch.compile(step, backend="cotrain", options=shared | options)
    compiled(characters)
    return Side(lambda: compiled(characters), cotrain_compile.inspect(compiled))


def interpreter(side: Side) -> Callable[[], object]:
    """`fx.Interpreter` on the graph of a resident side, with copies of its inputs."""
    placed, kept = side.placed, list[Any]()
    assert placed is not None
    run_step = placed._program.run_step

    def note(inputs: Any, **given: Any) -> Any:
        kept[:] = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in inputs]
        return run_step(inputs, **given)

    placed._program.run_step = note  # type: ignore[method-assign]
    side.run()
    placed._program.run_step = run_step  # type: ignore[method-assign]
    program = fx.Interpreter(placed.graph.module)

    def run() -> object:
        with torch.no_grad():
            return program.run(*kept)

    return run


def seconds_a_step(run: Callable[[], object]) -> float:
    """Mean of `STEPS` steps."""
    began_s = time.perf_counter()
    for _ in range(STEPS):
        run()
    return (time.perf_counter() - began_s) / STEPS


def record(side: Side, step_s: float, resident_call_s: float) -> dict[str, Any]:
    """What a step of one side takes; where it has tasks, one of these with its waits.

    That is what is left when the other calls take `resident_call_s`, as in the resident step.
    """
    found: dict[str, Any] = {"step_ms": step_s * 1e3}
    tasks = len(side.placed.plan.tasks) if side.placed else 0
    if side.calls:
        found["calls"] = side.calls
    if tasks:
        left_s = step_s - side.calls * resident_call_s
        return {**found, "tasks": tasks, "us_a_task": left_s * 1e6 / tasks}
    return {**found, "us_a_call": step_s * 1e6 / side.calls} if side.calls else found


def show_profile(side: Side) -> None:
    """Where `STEPS` steps spend their time, the most expensive functions first."""
    profile = cProfile.Profile()
    profile.runcall(seconds_a_step, side.run)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Measure all sides in turn, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--profile", choices=SIDES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        show_profile(new_side(SIDES[arguments.profile]))
        return
    sides = {name: new_side(options) for name, options in SIDES.items()}
    resident = sides["eager lowering, resident"]
    sides[INTERPRETER] = Side(interpreter(resident), resident.placed)
    best_s = dict.fromkeys(sides, float("inf"))
    for _ in range(ROUNDS):
        for name, side in sides.items():
            best_s[name] = min(best_s[name], seconds_a_step(side.run))
    records = {}
    for name, side in sides.items():
        alone = name.replace("updates on the host", "resident")
        call_s = best_s[alone] / max(1, sides[alone].calls)
        records[name] = record(side, best_s[name], call_s)
        Console(soft_wrap=True).print(name, records[name])
    if arguments.output:
        write_report(arguments.output, (__doc__ or "").splitlines()[0], {"sides": records})


if __name__ == "__main__":
    main()
