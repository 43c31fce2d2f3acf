"""Does a step of several ranks train as in eager, however it is shared, trained and placed?

python -m bench.reliability.matrix_of_ranks --ranks 2 --at-once 2 -o reliability_matrix_2.json

The cells are those of `tests/support/matrix_of_ranks.py`: the way to share a model x memory x
optimizer x way to train. Ranks are started once for many cells; cells that differ in their memory
alone share the step in eager and the one with everything on the device. What the output has is not
run again, so that a campaign that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.report import write_report
from tests.support.matrix_of_ranks import ALL, Cell, alike, problems
from tests.support.ranks import Ranks, ranks

# Neighbours differ in every dimension; it shares no factor with the number of groups.
STRIDE = 37
# For the cells of a group, on a machine that others use.
PATIENCE_S = 900.0


def told(cell: Cell) -> str:
    """As the report has it."""
    return f"{cell.shared}, {cell.memory}, {cell.optimizer}, {cell.way}"


def groups(known: Sequence[str], most: int | None) -> list[list[Cell]]:
    """Cells that are run together, those that are `known` left out; so many groups at most."""
    every = alike(ALL)
    mixed = [every[number * STRIDE % len(every)] for number in range(len(every))][:most]
    left = ([cell for cell in group if told(cell) not in known] for group in mixed)
    return [group for group in left if group]


def wrong_of(free: queue.Queue[Ranks], cells: list[Cell]) -> dict[str, str]:
    """What is wrong with each cell on any rank, on ranks that are free; "" where nothing is."""
    of_cells = dict.fromkeys(map(told, cells), "")
    started = free.get()
    try:
        for rank, found in enumerate(started.run(problems, cells)):
            for cell, wrong in found.items():
                if wrong and not of_cells[told(cell)]:
                    of_cells[told(cell)] = f"rank {rank}: {wrong}"
    except pytest.fail.Exception as error:  # the ranks are stopped, and start anew
        of_cells = dict.fromkeys(of_cells, str(error))
    finally:
        free.put(started)
    return of_cells


def campaign(count: int, left: list[list[Cell]], at_once: int) -> Iterator[dict[str, str]]:
    """What is wrong with each cell, group by group, on `at_once` groups of `count` ranks."""
    free: queue.Queue[Ranks] = queue.Queue()
    with ExitStack() as stack, ThreadPoolExecutor(at_once) as pool:
        for _ in range(at_once):
            free.put(stack.enter_context(ranks(count, PATIENCE_S)))
        for done in as_completed([pool.submit(wrong_of, free, group) for group in left]):
            yield done.result()


def as_result(count: int, of_cells: dict[str, str], minutes: float) -> dict[str, Any]:
    """For the report."""
    broken = [
        {"kind": cell.split(", ")[0], "case": cell, "what": wrong}
        for cell, wrong in sorted(of_cells.items())
        if wrong
    ]
    parts = Counter(part for cell in of_cells for part in cell.split(", ")[:2])
    return {
        "campaign": f"steps of {count} ranks, in every way to share, train and place them",
        "cases": len(of_cells),
        "held": len(of_cells) - len(broken),
        "refused": 0,
        "faults": 0,
        "broken": broken,
        "minutes": round(minutes, 1),
        "kinds": dict(sorted(parts.items())),
        "ranks": count,
        "cells_in_all": len(ALL),
        "cells": sorted(of_cells),
    }


def main() -> None:
    """Run what is left of a campaign; figures are written after each group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, help="at most, of cells that share a step")
    parser.add_argument("--at-once", type=int, default=1, help="groups of ranks side by side")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    before: dict[str, Any] = {"cells": [], "broken": [], "minutes": 0.0}
    if asked.output.exists():
        before = json.loads(asked.output.read_text())["result"]
    broken = {each["case"] for each in before["broken"]}  # tried again
    of_cells = {cell: "" for cell in before["cells"] if cell not in broken}
    began_s = time.monotonic()
    for found in campaign(asked.ranks, groups(list(of_cells), asked.groups), asked.at_once):
        of_cells |= found
        minutes = before["minutes"] + (time.monotonic() - began_s) / 60
        for cell, wrong in found.items():
            if wrong:
                print(cell, wrong, flush=True)
        result = as_result(asked.ranks, of_cells, minutes)
        write_report(asked.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
