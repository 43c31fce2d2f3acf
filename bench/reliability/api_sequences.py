"""Does a change around a step break it? Random sequences of changes, compared with eager's.

python -m bench.reliability.api_sequences --minutes 60 --seed 0 \
    -o bench/results/reliability_api_sequences.json
python -m bench.reliability.api_sequences --simplest 17

A sequence calls a compiled step and, between the calls, does what programs do to a model and its
optimizer; see `tests.support.sequences`. `--simplest` prints what is left of a seed that broke.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.reliability.fuzz import campaign
from bench.report import write_report
from tests.support.sequences.lock_step import run
from tests.support.sequences.sequence import Sequence, random_sequence, simplest


def breaks(sequence: Sequence) -> bool:
    """Whether a promise does not hold in it; one that cannot be run breaks, too."""
    try:
        run(sequence)
    except Exception:
        return True
    return False


def main() -> None:
    """Run a campaign and write its figures, or print the simplest of a seed that broke."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence")
    parser.add_argument("--simplest", type=int, metavar="SEED", help="shrink this one")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    if asked.simplest is not None:
        sequence = random_sequence(asked.simplest)
        print(simplest(sequence, breaks) if breaks(sequence) else "holds")
        return
    start_s = time.monotonic()
    statuses: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    for case in campaign("sequences", asked.seed, start_s + 60 * asked.minutes):
        statuses[case.status] += 1
        if case.status == "broken":
            broken.append({"seed": case.seed, "what": case.message})
        else:
            told = json.loads(case.message)
            kinds.update(told["held"])
            refusals.update(told["refused"])
        print(case.seed, case.status, case.message, flush=True)
        if asked.output is not None:  # a run that is stopped leaves what it has
            result = {
                "campaign": "sequences of changes around a step, in lock step with eager",
                "cases": statuses.total(),
                "held": statuses["equal"],
                "refused": statuses["refused"],
                "faults": 0,
                "broken": broken,
                "minutes": round((time.monotonic() - start_s) / 60, 1),
                "first_seed": asked.seed,
                "kinds": {name.replace("_", " "): number for name, number in kinds.items()},
                "refusals": dict(refusals.most_common()),
            }
            write_report(asked.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
