"""How long does the first step take, compiling included, beside stock torch.compile?

The sides and models of `bench.compiler.against_torch_compile`, each in a process of its own: cold
with an empty cache folder, warm with what the cold one has left there. Seconds of the processor
count the compilers that were started, one at a time; wall time has what else ran on the machine.
Ours traces the step as a whole and plans it, stock compiles model and optimizer apart.

    python -m bench.compiler.compile_seconds -o bench/results/compile_seconds.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch._dynamo.utils import counters

import cotrain_compile
from bench.compiler.against_torch_compile import MODELS, SIDES, make_side
from bench.compiler.processor import ALONE, CACHES, processor_s
from bench.report import write_report


def first_step(side_name: str, model: str) -> dict[str, Any]:
    """The first step in this process."""
    side, tokens = make_side(side_name, model)
    began_s, began_processor_s = time.perf_counter(), processor_s()
    side.step(tokens)
    found: dict[str, Any] = {
        "processor_s": round(processor_s() - began_processor_s, 2),
        "wall_s": round(time.perf_counter() - began_s, 2),
        "found_in_cache": counters["inductor"]["fxgraph_cache_hit"],
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
    }
    if side_name == "ours":
        lowered = cotrain_compile.inspect(side.step).lowered
        assert lowered is not None
        found |= {"segments": len(lowered.code), "kinds": lowered.kinds}
    return found


def in_a_process(side: str, model: str, cache: str) -> dict[str, Any]:
    """As `first_step`, in a process with this cache folder."""
    command = [
        sys.executable,
        "-m",
        "bench.compiler.compile_seconds",
        "--side",
        side,
        "--model",
        model,
    ]
    environment = {**os.environ, **ALONE, **{f"{whose}_CACHE_DIR": cache for whose in CACHES}}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{side} on {model} failed:\n{run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def cold_and_warm(side: str, model: str) -> Mapping[str, Any]:
    """Two processes one after the other, with the same cache folder."""
    with tempfile.TemporaryDirectory() as cache:
        return {state: in_a_process(side, model, cache) for state in ("cold", "warm")}


def main() -> None:
    """Measure all models and sides, print and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--jobs", type=int, default=1, help="sides at a time")
    parser.add_argument("--side", choices=list(SIDES), help="one first step, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.side:
        sys.stdout.write(f"{json.dumps(first_step(arguments.side, arguments.model))}\n")
        return
    console = Console(soft_wrap=True)
    result: dict[str, Any] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {
            (model, side): pool.submit(cold_and_warm, side, model)
            for model in ([arguments.model] if arguments.model else MODELS)
            for side in SIDES
        }
        for (model, side), run in runs.items():
            result.setdefault(model, {})[side] = run.result()
            console.print(model, side, run.result())
    if arguments.output:
        write_report(arguments.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
