"""Where do the seconds of a first step go, and what does a layer more cost? Beside stock's.

A GPT of width 16 with 4 and 12 layers, clipping and AdamW, each measure in a process of its own:
ours as it is, ours with every layer lowered and every update traced, and stock torch.compile of
model, loss and `optimizer.step` with its graphs run in eager. Nothing is compiled to kernels: what
is timed is what hangs on how many layers there are. Seconds are of the processor.

    python -m bench.compiler.first_step -o bench/results/first_step.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from bench.report import write_report
from cotrain_compile.capture.dynamo import patches
from cotrain_compile.capture.layers import lower
from cotrain_compile.demo.model import CharacterGPT, Shape
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.support.collector import collector_off

LAYERS = (4, 12)


def model_and_batch(layers: int) -> tuple[nn.Module, Tensor]:
    """A model next to no computing, and its batch."""
    shape = Shape(characters=16, context=8, width=16, layers=layers, heads=2)
    return CharacterGPT(shape), torch.randint(16, (1, 9))


def loss_of(model: nn.Module, characters: Tensor) -> Tensor:
    """What is trained on: the next character."""
    logits = model(characters[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())


def ours(layers: int) -> dict[str, Any]:
    """The step traced as it is."""

    def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        model, batch = model_and_batch(layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(characters: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, characters)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return step, (batch,)

    began_s = time.process_time()
    step = trace_graph(build)
    traced_s = time.process_time()
    with collector_off():
        extract(step)
    return {
        "all": time.process_time() - began_s,
        "extract": time.process_time() - traced_s,
        "nodes": len(step.nodes),
    }


def ours_whole(layers: int) -> dict[str, Any]:
    """The step traced with nothing taken for known."""
    with (
        mock.patch.object(lower, "_parts", lambda *_: []),
        mock.patch.object(patches, "traced_once_a_kind", lambda *_: None),
    ):
        return ours(layers)


def stock(layers: int) -> dict[str, Any]:
    """Model with its loss, and the update, each compiled by torch and called once."""
    model, batch = model_and_batch(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(loss_of, backend="aot_eager")
    update = torch.compile(optimizer.step, backend="aot_eager")
    began_s = time.process_time()
    compiled(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    update()
    return {"all": time.process_time() - began_s}


SIDES = {"ours": ours, "ours, each layer": ours_whole, "stock": stock}


def measured(side: str, layers: int) -> dict[str, Any]:
    """One side of one depth, in this process."""
    torch.set_num_threads(1)
    return {key: round(value, 2) for key, value in SIDES[side](layers).items()}


def in_a_process(side: str, layers: int) -> dict[str, Any]:
    """As `measured`, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.compiler.first_step"]
    command += ["--side", side, "--layers", str(layers)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{side} with {layers} layers failed:\n{run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure all sides and depths, print and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--side", choices=list(SIDES), help="one side of one depth, as JSON")
    arguments = parser.parse_args()
    if arguments.side:
        found = measured(arguments.side, arguments.layers[0])
        sys.stdout.write(f"{json.dumps(found)}\n")
        return
    console = Console(soft_wrap=True)
    result: dict[str, dict[str, Any]] = {}
    for layers in arguments.layers:
        for side in SIDES:
            found = in_a_process(side, layers)
            result.setdefault(side, {})[str(layers)] = found
            console.print(layers, side, found)
    if arguments.output:
        write_report(arguments.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
