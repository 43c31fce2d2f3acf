"""Does a step for a card go through to its segments, for every optimizer, precision and attention?

    python -m bench.gpu.fake_cuda -o bench/results/fake_cuda_matrix.json

The card is that of `tests/fake_cuda`: it needs a C++ compiler and no GPU, and runs nothing. Each
training is traced once; every policy then plans it, rewrites it and cuts it into segments. The
whole product has 2304 cells. By default every pair of optimizer and precision is traced, with
attention and accumulation taking turns so that each pair of any two factors is there; `--whole`
traces all. `--again FILE` runs those of an earlier report that failed, and keeps its other rows. A
training that is refused in so many words, as an optimizer that makes its state in its first step is
under `GradScaler`, counts as refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.report import write_report
from tests.fake_cuda.library import library

OPTIMIZERS = (
    *("AdamW", "AdamW, fused", "AdamW, capturable", "Adam", "SGD", "RMSprop", "NAdam", "RAdam"),
    *("Adamax", "ASGD", "Rprop", "Adagrad", "Adadelta", "Adafactor", "Muon", "lion-pytorch"),
    *("sign of momentum", "trusted Adam"),
)
PRECISIONS = ("float32", "bfloat16 weights", "bfloat16 autocast", "float16 scaled")
ATTENTION = ("flash", "efficient", "cudnn", "math")
MICRO_BATCHES = (1, 2)
FACTORS = ("optimizer", "precision", "attention", "micro_batches", "policy")
POLICIES = ("resident", "zero-offload", "streamed", "auto")
WHOLE = len(OPTIMIZERS) * len(PRECISIONS) * len(ATTENTION) * len(MICRO_BATCHES) * len(POLICIES)
# Why a training may be refused: `GradScaler` may skip the step in which its states are made.
REFUSALS = ("creates state in its first step", "counts in Python numbers")

Cell = dict[str, Any]


def main(given: Sequence[str] | None = None) -> None:
    """Run the cells; see above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--whole", action="store_true", help="every cell, for hours")
    parser.add_argument("--again", type=Path, help="a report whose failed cells are run again")
    arguments = parser.parse_args(given)
    cells = list(whole() if arguments.whole else covering())
    earlier = json.loads(arguments.again.read_text())["result"] if arguments.again else {}
    known = {_key(row): row for row in earlier.get("rows", ()) if row["status"] != "failed"}
    library()
    began = time.monotonic() - earlier.get("seconds", 0)
    known |= {_key(row): row for row in run([cell for cell in cells if _key(cell) not in known])}
    rows = [known[_key(cell)] for cell in cells]
    counts = Counter(row["status"] for row in rows)
    failed = [row for row in rows if row["status"] == "failed"]
    result = {
        "cells": len(rows),
        "cells_of_the_product": WHOLE,
        "counts": dict(counts),
        "seconds": round(time.monotonic() - began),
        "failed": failed,
        "rows": [{key: row[key] for key in row if key != "error"} for row in rows],
    }
    write_report(arguments.output, (__doc__ or "").splitlines()[0], result)
    print(f"{len(rows)} of {WHOLE} cells: {dict(counts)}")


def _key(cell: Cell) -> tuple[Any, ...]:
    """What is varied, of a cell or a row."""
    return tuple(cell[factor] for factor in FACTORS)


def covering() -> Iterator[Cell]:
    """Every pair of two factors, for all policies."""
    for (i, optimizer), (j, precision) in itertools.product(
        enumerate(OPTIMIZERS), enumerate(PRECISIONS)
    ):
        attention = ATTENTION[(i + j) % len(ATTENTION)]
        # Without the shift every other kernel of attention would be seen with one number only.
        yield from _placed(optimizer, precision, attention, MICRO_BATCHES[(i // 4 + j) % 2])


def whole() -> Iterator[Cell]:
    """The product of all factors."""
    for factors in itertools.product(OPTIMIZERS, PRECISIONS, ATTENTION, MICRO_BATCHES):
        yield from _placed(*factors)


def _placed(optimizer: str, precision: str, attention: str, micro_batches: int) -> Iterator[Cell]:
    for policy in POLICIES:
        yield {
            "optimizer": optimizer,
            "precision": precision,
            "attention": attention,
            "micro_batches": micro_batches,
            "policy": policy,
        }


def run(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Each cell with what came of it, from one process that has the card."""
    command = [sys.executable, "-m", "tests.fake_cuda"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(cells))
        process.stdin.close()
        lines = (line for line in process.stdout if line.startswith("RESULT "))
        for cell, line in zip(cells, lines, strict=True):
            found = json.loads(line.removeprefix("RESULT "))
            refused = any(reason in found["error"] for reason in REFUSALS)
            status = "refused" if refused else "failed" if found["error"] else "passed"
            print(f"{status:8} {found['name']}", flush=True)
            yield {**cell, **found, "status": status}


if __name__ == "__main__":
    main()
