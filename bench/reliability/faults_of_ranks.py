"""Does a rank that fails leave the others waiting? Ranks that raise, die or hang anywhere.

python -m bench.reliability.faults_of_ranks --times 60 -o bench/results/reliability_ranks.json

A case starts two or three ranks over gloo and lets one of them fail: raise, leave, be killed, hang,
or be stopped with its connections open; before the first plan, in a rehearsal, in a replan, before
or in an exchange of a later step, in a checkpoint; with each kind of model. It holds if every other
rank ends with an error of ours (of torch's in a checkpoint) within the timeout of the group, and
`SPARE_S` for the work that the machine has besides.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.report import write_report
from tests.support.faults_of_ranks import HOWS, MODELS, PLACES, End, Fault, NotReached, inject

# Of the group: long enough for ranks that start on a busy machine.
TIMEOUT_S, SPARE_S = 12.0, 15.0
CHECKPOINT = "in a checkpoint"


def fault_of(seed: int) -> Fault:
    """Each place in turn; how it fails, where and in what, by chance."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 2, 3))
    return Fault(
        rng.choice(HOWS),
        PLACES[seed % len(PLACES)],
        rng.choice(MODELS),
        ranks=ranks,
        rank=rng.randrange(1, ranks) if rng.random() < 2 / 3 else 0,
        number=rng.randrange(4),
        timeout_s=TIMEOUT_S,
    )


def what_is_wrong(fault: Fault, end: End) -> str:
    """Why a rank ended other than it should; "" where all is well."""
    if end.kind == "hung":
        return f"rank {end.rank} came to no end"
    if end.kind == "":
        return f"rank {end.rank} trained on as if nothing had happened"
    if not end.is_ours and fault.place != CHECKPOINT:
        return f"rank {end.rank} ended with {end.kind}: {end.told[:300]}"
    if end.seconds > fault.timeout_s + SPARE_S:
        return f"rank {end.rank} ended after {end.seconds:.0f} s"
    return ""


def campaign(times: int, first: int, output: Path) -> None:
    """Inject so many faults; the figures are written after each."""
    began_s, kinds, ends = time.monotonic(), Counter[str](), Counter[str]()
    broken: list[dict[str, str]] = []
    slowest_s, not_reached = 0.0, 0
    for seed in range(first, first + times):
        fault = fault_of(seed)
        wrong = ""
        try:
            found = inject(fault)
        except NotReached as error:
            not_reached += 1
            print(error, flush=True)
            continue
        for end in found:
            ends[end.kind or "silent"] += 1
            slowest_s = max(slowest_s, end.seconds)
            wrong = wrong or what_is_wrong(fault, end)
        kinds[f"a rank fails {fault.place} ({fault.how})"] += 1
        if wrong:
            broken.append({"kind": fault.place, "case": str(fault), "what": wrong})
            print(seed, fault, wrong, flush=True)
        result: dict[str, Any] = {
            "campaign": "ranks that raise, die or hang while others train with them",
            "cases": kinds.total(),
            "held": kinds.total() - len(broken),
            "refused": 0,
            "faults": kinds.total(),
            "broken": broken,
            "minutes": round((time.monotonic() - began_s) / 60, 1),
            "kinds": dict(sorted(kinds.items())),
            "ends": dict(ends),
            "slowest_s": round(slowest_s, 1),
            "timeout_s": TIMEOUT_S,
            "not_reached": not_reached,
            "first_seed": first,
        }
        write_report(output, (__doc__ or "").splitlines()[0], result)


def main() -> None:
    """Run a campaign and write its figures, also of one that is stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    campaign(asked.times, asked.first, asked.output)


if __name__ == "__main__":
    main()
