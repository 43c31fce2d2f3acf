"""Run cells of `STEPS` for cards that are not there: JSON on stdin, results as JSON on stdout.

A step is traced as `trace(..., machine=...)` does it, so torch's own rules choose the kernels of
attention, and goes on to its segments here. Cells side by side of one step and machine share it.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch

from cotrain_compile.capture.offline.absent_card import absent_card, card_for
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.graph import StepGraph
from tests.fake_cuda import steps_of_images, steps_of_text
from tests.fake_cuda.absent_library import compile_once
from tests.fake_cuda.cells import Cell, Result, run_cell
from tests.fake_cuda.steps import STEPS

assert steps_of_images
assert steps_of_text  # they add their steps


def run(cells: Sequence[Cell]) -> Iterator[Result]:
    """Take each cell as far as it goes."""
    for first, same in itertools.groupby(cells, lambda cell: replace(cell, policy="")):
        step = traced(first)
        yield from (run_cell(cell, step) for cell in same)


def traced(cell: Cell) -> StepGraph | Exception:
    """The step of a cell as on its card, or why there is none."""
    card = card_for(None, cell.machine)
    assert card is not None
    torch._dynamo.reset()
    with warnings.catch_warnings(), absent_card(*card):
        warnings.simplefilter("ignore")  # libraries have their say about deprecated things
        try:
            return trace_graph(STEPS[cell.training], device="cuda", checkpoints=cell.checkpoints)
        except Exception as error:
            return error


def main() -> None:
    """A line of output for each cell, in their order."""
    compile_once()
    for result in run([Cell(**cell) for cell in json.load(sys.stdin)]):
        print("RESULT", json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
