"""What does a placed step cost beyond its kernels? Processor time a step, on tiny tensors.

A GPT of 24 layers and width 8, on one thread: what its kernels compute is next to nothing, so that
a step takes what Python and ATen's dispatch take. Ours is measured resident and with every update
on the host, with ATen's kernels and with Inductor's; beside it are the same step in eager PyTorch,
`fx.Interpreter` on the captured graph, and the graph's ops in a bare loop, with their arguments at
hand: what dispatch alone takes. All take turns in one process; a side counts with the least
processor time of its rounds, that of all threads. A step is what the user calls, with Dynamo's
guards; the graph by itself is without.

    python -m bench.runtime.overhead --before before.json -o bench/results/overhead.json

`--before FILE` puts the result of an earlier run beside this one: compare what both are of eager's.

`--profile SIDE` shows where the time of one side goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
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
from cotrain_compile.demo.job import CharacterGPT, Shape
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
BARE_LOOP = "its ops in a bare loop"


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
    shared = {"quiet": True, "poison": False, "work_limit": 5.0}
    compiled = torch.compile(step, backend="cotrain", options=shared | options)
    compiled(characters)
    return Side(lambda: compiled(characters), cotrain_compile.inspect(compiled))


class _Noting(fx.Interpreter):
    """Notes what each op is called with; nothing is freed."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.calls: list[tuple[Callable[..., Any], Any, Any]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append((target, args, kwargs))
        return super().call_function(target, args, kwargs)


def of_the_graph(side: Side) -> dict[str, Side]:
    """The graph of a resident side by itself, with copies of its inputs."""
    placed, kept = side.placed, list[Any]()
    assert placed is not None
    run_step = placed._program.run_step

    def note(inputs: Any, **given: Any) -> Any:
        kept[:] = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in inputs]
        return run_step(inputs, **given)

    placed._program.run_step = note  # type: ignore[method-assign]
    side.run()
    placed._program.run_step = run_step  # type: ignore[method-assign]
    program, noting = fx.Interpreter(placed.graph.module), _Noting(placed.graph.module)
    with torch.no_grad():
        noting.run(*kept)

    def interpret() -> object:
        with torch.no_grad():
            return program.run(*kept)

    def loop() -> None:
        with torch.no_grad():
            for target, args, kwargs in noting.calls:
                target(*args, **kwargs)

    return {INTERPRETER: Side(interpret, placed), BARE_LOOP: Side(loop, placed)}


def seconds_a_step(run: Callable[[], object]) -> float:
    """Processor time of a step, the mean of `STEPS`."""
    began_s = time.process_time()
    for _ in range(STEPS):
        run()
    return (time.process_time() - began_s) / STEPS


def record(side: Side, step_s: float, eager_s: float) -> dict[str, Any]:
    """What a step of one side takes, also as a multiple of eager's, and what it has to run."""
    found: dict[str, Any] = {"step_ms": step_s * 1e3, "of_eager": step_s / eager_s}
    if not side.calls:
        return found
    tasks = len(side.placed.plan.tasks) if side.placed else 0
    us_each = step_s * 1e6 / (side.calls + tasks)
    return {**found, "calls": side.calls, "tasks": tasks, "us_each": us_each}


def show_profile(side: Side) -> None:
    """Where `STEPS` steps spend their time, the most expensive functions first."""
    profile = cProfile.Profile()
    profile.runcall(seconds_a_step, side.run)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Measure all sides in turn, print a line for each and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--before", type=Path, help="the result of an earlier run")
    parser.add_argument("--profile", choices=SIDES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        show_profile(new_side(SIDES[arguments.profile]))
        return
    sides = {name: new_side(options) for name, options in SIDES.items()}
    resident = sides["eager lowering, resident"]
    sides |= of_the_graph(resident)
    best_s = dict.fromkeys(sides, float("inf"))
    for _ in range(ROUNDS):
        for name, side in sides.items():
            best_s[name] = min(best_s[name], seconds_a_step(side.run))
    eager_s = best_s["eager PyTorch"]
    records = {name: record(side, best_s[name], eager_s) for name, side in sides.items()}
    for name, found in records.items():
        Console(soft_wrap=True).print(name, found)
    if arguments.output:
        earlier = json.loads(arguments.before.read_text()) if arguments.before else None
        before = earlier["result"]["sides"] if earlier else {}
        result = {"before": before, "sides": records}
        write_report(arguments.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
