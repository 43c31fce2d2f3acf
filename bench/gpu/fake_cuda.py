"""Does a step for a card go through to its segments, for every optimizer, precision and attention?

    python -m bench.gpu.fake_cuda -o bench/results/fake_cuda_matrix.json

The card is that of `tests/fake_cuda`: it needs a C++ compiler and no GPU, and runs nothing. Every
policy plans a training, rewrites it and cuts it into segments; Dynamo traces it once for all
kernels of attention. The whole product has 2304 cells and takes about 40 minutes of a quiet core.
By default every pair of optimizer and precision is traced, with attention and accumulation taking
turns so that each pair of any two factors is there; `--whole` traces all.

In parts: `--minutes N` begins no training after N minutes and writes what there is, `--again FILE`
keeps the rows of earlier reports and runs what is not there or failed, and `--part 1/2` is the
first half of the trainings, for two processes. A training that is refused in so many words, as an
optimizer that makes its state in its first step is under `GradScaler`, counts as refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
    parser.add_argument("--whole", action="store_true", help="every cell")
    parser.add_argument("--again", type=Path, nargs="+", default=[], help="earlier reports")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after them")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the trainings")
    arguments = parser.parse_args(given)
    earlier = [json.loads(path.read_text())["result"] for path in arguments.again]
    rows = [row for report in earlier for row in report["rows"]]
    known = {_key(row): row for row in rows if row["status"] != "failed"}
    wanted = _part(list(whole() if arguments.whole else covering()), arguments.part)
    missing = [cell for cell in wanted if _key(cell) not in known]
    library()
    began_s = time.monotonic()
    known |= {_key(row): row for row in run(_part(missing, arguments.part), 60 * arguments.minutes)}
    seconds = time.monotonic() - began_s + sum(report["seconds"] for report in earlier)
    rows = [known[_key(cell)] for cell in wanted if _key(cell) in known]
    counts = Counter(row["status"] for row in rows)
    result = {
        "cells": len(rows),
        "cells_of_the_product": WHOLE,
        "counts": dict(counts),
        "seconds": round(seconds),
        "failed": [row for row in rows if row["status"] == "failed"],
        "rows": [{key: row[key] for key in row if key != "error"} for row in rows],
    }
    write_report(arguments.output, (__doc__ or "").splitlines()[0], result)
    print(f"{len(rows)} of {WHOLE} cells: {dict(counts)}")


def _part(cells: Sequence[Cell], part: str) -> list[Cell]:
    """ "2/3": the second third of the trainings, which stay whole."""
    number, parts = map(int, part.split("/"))
    factors = [factor for factor in FACTORS if factor not in ("attention", "policy")]
    of_training = itertools.groupby(cells, lambda cell: tuple(cell[name] for name in factors))
    trainings = [list(same) for _, same in of_training]
    return [cell for same in trainings[number - 1 :: parts] for cell in same]


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
    """The product of all factors; what shares a trace is side by side."""
    for optimizer, precision, micro_batches, attention in itertools.product(
        OPTIMIZERS, PRECISIONS, MICRO_BATCHES, ATTENTION
    ):
        yield from _placed(optimizer, precision, attention, micro_batches)


def _placed(optimizer: str, precision: str, attention: str, micro_batches: int) -> Iterator[Cell]:
    for policy in POLICIES:
        yield {
            "optimizer": optimizer,
            "precision": precision,
            "attention": attention,
            "micro_batches": micro_batches,
            "policy": policy,
        }


def run(cells: Sequence[Cell], limit_s: float = math.inf) -> Iterator[dict[str, Any]]:
    """Each cell with what came of it, from one process that has the card, for so many seconds."""
    command = [sys.executable, "-m", "tests.fake_cuda"]
    ends_s = time.monotonic() + limit_s
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(cells))
        process.stdin.close()
        lines = (line for line in process.stdout if line.startswith("RESULT "))
        for cell, line in itertools.zip_longest(cells, lines):
            assert line, f"the process ended before {cell}"
            yield _row(cell, json.loads(line.removeprefix("RESULT ")))
            if time.monotonic() > ends_s:
                process.kill()
                return


def _row(cell: Cell, found: dict[str, Any]) -> dict[str, Any]:
    refused = any(reason in found["error"] for reason in REFUSALS)
    status = "refused" if refused else "failed" if found["error"] else "passed"
    print(f"{status:8} {found['name']}", flush=True)
    return {**cell, **found, "status": status}


if __name__ == "__main__":
    main()
