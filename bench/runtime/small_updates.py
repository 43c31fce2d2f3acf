"""What do many small updates on the host cost? Processor time a step, as a multiple of eager's.

Two steps: adapters of rank 4 over a frozen GPT of 24 layers, of which only the adapters are
trained, and the norms and biases of that GPT alone. All updates are on the host; the plan has them
in bundles, or each task is by itself. All take turns in one process, with one thread for ATen; a
side counts with the median of its rounds, each a multiple of eager's in the same round.

    python -m bench.runtime.small_updates -o bench/results/small_updates.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import cotrain_compile
from bench.report import write_report
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.placement.schedule import schedule
from cotrain_compile.plan import carried_out
from cotrain_compile.support.disk_cache import VARIABLE

SHAPE = Shape(characters=16, context=8, width=8, layers=24, heads=2)
RANK = 4
ROUNDS, STEPS = 15, 3
SHARED = {"quiet": True, "poison": False, "time_limit": 5.0, "policy": "zero-offload"}
STEP_NAMES = ("adapters", "norms and biases")


class Adapter(nn.Module):
    """A frozen layer with a trained low-rank product beside it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(RANK, frozen.in_features) / frozen.in_features)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up)


def trained_model(name: str) -> nn.Module:
    """The GPT, of which `name` alone are trained."""
    model = CharacterGPT(SHAPE)
    for parameter in model.parameters():
        parameter.requires_grad_(name == "norms and biases" and parameter.dim() == 1)
    if name == "adapters":
        for module in list(model.modules()):
            for part, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear) and not isinstance(module, Adapter):
                    setattr(module, part, Adapter(layer))
    return model


def new_step(name: str, lowering: str | None) -> tuple[Callable[[], object], dict[str, int]]:
    """A step that has run once, in eager where there is no `lowering`; what it has."""
    torch.manual_seed(0)
    model = trained_model(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    characters = torch.randint(SHAPE.characters, (1, SHAPE.context + 1))

    def step(characters: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(characters[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss

    if lowering is None:
        return lambda: step(characters), {"trained": len(trained)}
    compiled = torch.compile(step, backend="cotrain", options={**SHARED, "lowering": lowering})
    compiled(characters)
    tasks = cotrain_compile.inspect(compiled).plan.tasks
    return lambda: compiled(characters), {"tasks": len(tasks), "starts": len(carried_out(tasks))}


def sides_of(name: str, lowering: str) -> dict[str, tuple[Callable[[], object], dict[str, int]]]:
    """Eager, and ours with and without bundles."""
    sides = {"eager": new_step(name, None), "in bundles": new_step(name, lowering)}
    torch._dynamo.reset()
    with mock.patch.object(schedule, "REACHES", ()):
        sides["one by one"] = new_step(name, lowering)
    return sides


def seconds_a_step(run: Callable[[], object]) -> float:
    """Processor time of all threads, the mean of `STEPS`."""
    began_s = time.process_time()
    for _ in range(STEPS):
        run()
    return (time.process_time() - began_s) / STEPS


def measured(name: str, lowering: str) -> dict[str, Any]:
    """Of each side the milliseconds and multiples of eager's, medians of all rounds."""
    sides = sides_of(name, lowering)
    rounds = [
        {side: seconds_a_step(run) for side, (run, _) in sides.items()} for _ in range(ROUNDS + 1)
    ][1:]
    found = {}
    for side, (_, counts) in sides.items():
        of_eager = [seconds[side] / seconds["eager"] for seconds in rounds]
        found[side] = {
            **counts,
            "ms": 1e3 * statistics.median(seconds[side] for seconds in rounds),
            "of_eager": statistics.median(of_eager),
            "of_eager_least": min(of_eager),
            "of_eager_most": max(of_eager),
        }
    return found


def main() -> None:
    """Measure, print a line for each side and write the report."""
    question = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--lowering", default="eager", choices=["eager", "inductor"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ[VARIABLE] = ""  # both sides plan anew
    result = {name: measured(name, arguments.lowering) for name in STEP_NAMES}
    for name, found in result.items():
        for side, row in found.items():
            Console(soft_wrap=True).print(name, side, row)
    if arguments.output:
        write_report(arguments.output, question, {"lowering": arguments.lowering, **result})


if __name__ == "__main__":
    main()
