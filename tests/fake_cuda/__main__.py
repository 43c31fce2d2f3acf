"""Run cells in a process of their own: a JSON list on stdin, each result as JSON on stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from tests.fake_cuda import card

card.load()

from tests.fake_cuda.cells import Cell, run  # noqa: E402  after `load`


def main() -> None:
    """A line of output for each cell, in their order."""
    for result in run([Cell(**cell) for cell in json.load(sys.stdin)]):
        print("RESULT", json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
