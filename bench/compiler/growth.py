"""How do the compiler's time and memory grow with the step? Exponents in the number of nodes.

A Llama of 7B's width with 6 to 96 layers is traced under fake tensors and goes through every stage
in a process of its own; one more process runs a step of a GPT of width 8. An exponent is the slope
of a line through the logarithms of nodes and seconds, by least squares; that of the two largest
sizes is beside it, since constant costs flatten the line. The integer programs stop at their time
limit, so that `solve` says little. Seconds are of the processor, compilers included; calls of
functions, up to 24 layers, grow as the work does, whatever caches and the allocator make of it.

    python -m bench.compiler.growth -o bench/results/growth.json

`--profile STAGE` shows where one stage of the largest size spends its time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.compiler.growth_stages import stages_of, step_overhead
from bench.report import write_report

LAYERS = (6, 12, 24, 48, 96)
MOST_LAYERS_RUN = 24
"""Steps are run up to this depth: each takes two more captures."""
# So that what is compiled counts as this process's own seconds.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
MEASURES = {"stages": stages_of, "overhead": step_overhead}


def in_a_process(measure: str, layers: int) -> dict[str, Any]:
    """What `measure` finds for a model of so many layers, with an empty cache on disk."""
    command = [
        sys.executable,
        "-m",
        "bench.compiler.growth",
        "--only",
        measure,
        "--layers",
        str(layers),
    ]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, **ALONE}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{measure} of {layers} layers failed:\n{run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def measured(layers: Sequence[int], jobs: int) -> tuple[dict[int, Any], dict[int, Any]]:
    """Stages and overhead by number of layers, with so many processes at a time, large ones first.

    Seconds are of the processor, so that processes beside one another disturb little.
    """
    with ThreadPoolExecutor(jobs) as pool:
        largest_first = sorted(layers, reverse=True)
        stages = {n: pool.submit(in_a_process, "stages", n) for n in largest_first}
        run = [n for n in largest_first if n <= MOST_LAYERS_RUN]
        overhead = {n: pool.submit(in_a_process, "overhead", n) for n in run}
        return (
            {n: stages[n].result() for n in layers},
            {n: overhead[n].result() for n in layers if n in overhead},
        )


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size), by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def growth(sizes: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """`values` with both exponents."""
    last = math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])
    return {
        "sizes": list(sizes),
        "values": [float(f"{value:.4g}") for value in values],
        "exponent": round(exponent(sizes, values), 3),
        "exponent_of_the_largest_two": round(last, 3),
    }


def summary(
    stages: Mapping[int, Mapping[str, Any]], overhead: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Every measure over the sizes, with its exponents."""
    nodes = [found["nodes"] for found in stages.values()]
    measures = {measure: _by_stage(stages, measure) for measure in ("seconds", "calls")}
    memory = [s["process_bytes"]["all"] - s["process_bytes"]["imports"] for s in stages.values()]
    steps = {}
    for kind in next(iter(overhead.values())):
        ops = [found[kind]["ops"] for found in overhead.values()]
        step_s = [found[kind]["step_s"] for found in overhead.values()]
        us_an_op = [round(s * 1e6 / count, 2) for s, count in zip(step_s, ops, strict=True)]
        steps[kind] = {**growth(ops, step_s), "ops": ops, "us_an_op": us_an_op}
    return {
        "layers": list(stages),
        "nodes": nodes,
        "tasks": [found["tasks"] for found in stages.values()],
        **measures,
        "compiler_bytes": growth(nodes, memory),
        "segments": [found["segments"] for found in stages.values()],
        "kinds": [found["kinds"] for found in stages.values()],
        "seconds_a_step": steps,
    }


def _by_stage(stages: Mapping[int, Mapping[str, Any]], measure: str) -> dict[str, Any]:
    """The growth of one measure of each stage, over the sizes that have it."""
    names = {name: None for found in stages.values() for name in found[measure]}
    grown = {}
    for name in names:
        having = [found for found in stages.values() if name in found[measure]]
        if len(having) > 1:  # one size has no slope
            values = [found[measure][name] for found in having]
            grown[name] = growth([found["nodes"] for found in having], values)
    return grown


def show(found: Mapping[str, Any]) -> None:
    """One line a stage."""
    table = Table(title="seconds by nodes")
    for heading in ("stage", *map(str, found["nodes"]), "exponent", "last two", "of calls"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    rows = {**found["seconds"], "compiler memory, bytes": found["compiler_bytes"]}
    rows |= {f"a step, {kind}": row for kind, row in found["seconds_a_step"].items()}
    for name, row in rows.items():
        by_size = dict(zip(row["sizes"], row["values"], strict=True))
        values = [f"{by_size[n]:.3g}" if n in by_size else "" for n in found["nodes"]]
        if name.startswith("a step"):  # over the sizes of a smaller model
            values = [f"{value:.3g}" for value in row["values"]]
            values += [""] * (len(found["nodes"]) - len(values))
        exponents = (f"{row[key]:.2f}" for key in ("exponent", "exponent_of_the_largest_two"))
        calls = found["calls"].get(name)
        table.add_row(name, *values, *exponents, f"{calls['exponent']:.2f}" if calls else "")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print("kinds of segments", found["kinds"])


def main() -> None:
    """Measure all sizes, print the table and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", choices=list(MEASURES), help="one measure of one size, as JSON")
    parser.add_argument("--profile", help="show where a stage of the largest size spends its time")
    arguments = parser.parse_args()
    if arguments.profile:
        stages_of(arguments.layers[-1], arguments.profile)
        return
    if arguments.only:
        sys.stdout.write(f"{json.dumps(MEASURES[arguments.only](arguments.layers[-1]))}\n")
        return
    found = summary(*measured(arguments.layers, arguments.jobs))
    show(found)
    if arguments.output:
        write_report(arguments.output, (__doc__ or "").splitlines()[0], found)


if __name__ == "__main__":
    main()
