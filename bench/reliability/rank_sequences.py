"""Do ranks of which one does something else train alike, or are all of them told?

python -m bench.reliability.rank_sequences --minutes 10 --seed 0 -o reliability_rank_sequences.json

A case is a random sequence of `tests/support/rank_sequences.py`: settings, constants, batches,
checkpoints and parameters change on all ranks or on one alone, with replicas compared in every
step. It holds if all ranks train as one process does, or all end with an error and train on when
what one has done alone is undone. Each fourth case is of three ranks. Ranks are kept until a case
breaks.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.report import write_report
from tests.support.rank_sequences import Played, RankSequence, played, sequence_of
from tests.support.ranks import Ranks, ranks

PATIENCE_S = 240.0


@dataclass
class Figures:
    """What the cases so far came to."""

    cases: int = 0
    faults: int = 0
    acts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[dict[str, Any]] = field(default_factory=list)

    def add(self, seed: int, sequence: RankSequence, found: Played) -> None:
        """A sequence that has come to its end."""
        self.cases += 1
        self.faults += any(act.on is not None for act in sequence.acts)
        self.ends += found.ends
        for act in sequence.acts:
            self.acts[f"{act.what} on {'all ranks' if act.on is None else 'one rank'}"] += 1
        if found.wrong:
            self.broken.append({"seed": seed, "case": str(sequence), "what": found.wrong})

    def as_result(self, minutes: float, first: int) -> dict[str, Any]:
        """For the report."""
        return {
            "campaign": "sequences of what programs do between steps, on all ranks or on one alone",
            "cases": self.cases,
            "held": self.cases - len(self.broken),
            "refused": 0,
            "faults": self.faults,
            "broken": self.broken,
            "minutes": round(minutes, 1),
            "kinds": dict(sorted(self.acts.items())),
            "ends": dict(sorted(self.ends.items())),
            "first_seed": first,
        }


def found_by(started: Ranks, sequence: RankSequence) -> Played:
    """What the ranks say; what ends or hangs otherwise is wrong, too."""
    try:
        of_ranks: list[Played] = started.run(played, sequence)
    except pytest.fail.Exception as error:
        started.stop()
        return Played(str(error)[-600:])
    wrong = [found for found in of_ranks if found.wrong]
    if wrong or of_ranks[0].is_over:
        started.stop()
    return (wrong or of_ranks)[0]


def main() -> None:
    """Play sequences for so long; figures are written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    began_s, figures, seed = time.monotonic(), Figures(), asked.seed
    with ExitStack() as stack:
        started = {count: stack.enter_context(ranks(count, PATIENCE_S)) for count in (2, 3)}
        while (spent := (time.monotonic() - began_s) / 60) < asked.minutes:
            count = 3 if seed % 4 == 3 else 2
            sequence = sequence_of(seed, count)
            found = found_by(started[count], sequence)
            figures.add(seed, sequence, found)
            print(seed, count, sequence, found.wrong or "held", dict(found.ends), flush=True)
            spent = (time.monotonic() - began_s) / 60
            result = figures.as_result(spent, asked.seed)
            write_report(asked.output, (__doc__ or "").splitlines()[0], result)
            seed += 1


if __name__ == "__main__":
    main()
