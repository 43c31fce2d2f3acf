"""Does a rank that fails leave the others waiting? Ranks that raise, die or hang anywhere.

python -m bench.reliability.faults_of_ranks --times 200 --at-once 4 -o reliability_ranks.json

A case starts two or three ranks over gloo and lets one of them fail: raise, leave, be killed, hang,
or be stopped with its connections open; before the first plan, in a dry run, in a replan, before
or in an exchange of a later step, in a checkpoint; with each kind of model. With `--plans` it is
trained by plans of the cluster: pipelines, swapped stages, layers of widths, CPU helpers; and fails
before a step, in a turn, in an exchange or before an update. It holds if every other rank ends with
an error of ours (of torch's in a checkpoint) within the timeout of the group, and `SPARE_S` for the
work that the machine has besides. A case mostly waits for timeouts, so several
run at once, each with processes and a port of its own.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import write_report
from tests.support.faults_of_plans import PLAN_PLACES, PLANS
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


def fault_of_plan(seed: int) -> Fault:
    """Each plan in each place in turn; how it fails, and where, by chance."""
    rng = random.Random(seed)
    model = PLANS[seed % len(PLANS)]
    ranks = 3 if model == "helpers" else rng.choice((2, 2, 3))
    place = PLAN_PLACES[seed // len(PLANS) % len(PLAN_PLACES)]
    helper = ranks - 1 if model == "helpers" and place != "in an exchange" else ranks
    return Fault(
        rng.choice(HOWS),
        place,
        model,
        ranks=ranks,
        rank=rng.randrange(helper),
        number=rng.randrange(2) if place in ("in a turn",) and model != "helpers" else 0,
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


@dataclass
class Figures:
    """What the cases so far came to."""

    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[dict[str, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    not_reached: int = 0

    def add(self, fault: Fault, ends: list[End]) -> None:
        """A case in which the fault was let in."""
        self.kinds[f"a rank fails {fault.place} ({fault.how})"] += 1
        self.ends.update(end.kind or "silent" for end in ends)
        self.slowest_s = max(self.slowest_s, *(end.seconds for end in ends))
        wrong = next(filter(None, (what_is_wrong(fault, end) for end in ends)), "")
        if wrong:
            self.broken.append({"kind": fault.place, "case": str(fault), "what": wrong})
            print(fault, wrong, flush=True)

    def as_result(self) -> dict[str, Any]:
        """For the report."""
        return {
            "campaign": "ranks that raise, die or hang while others train with them",
            "cases": self.kinds.total(),
            "held": self.kinds.total() - len(self.broken),
            "refused": 0,
            "faults": self.kinds.total(),
            "broken": self.broken,
            "kinds": dict(sorted(self.kinds.items())),
            "ends": dict(sorted(self.ends.items())),
            "slowest_s": round(self.slowest_s, 1),
            "timeout_s": TIMEOUT_S,
            "not_reached": self.not_reached,
        }


def cases(
    times: int, first: int, at_once: int, made: Callable[[int], Fault] = fault_of
) -> Iterator[tuple[Fault, list[End] | None]]:
    """So many faults with what the other ranks came to, in the order in which cases end.

    None where the fault was not let in.
    """
    with ThreadPoolExecutor(at_once) as pool:
        faults = {
            pool.submit(_ends_of, fault): fault for fault in map(made, range(first, first + times))
        }
        for done in as_completed(faults):
            yield faults[done], done.result()


def _ends_of(fault: Fault) -> list[End] | None:
    try:
        return inject(fault)
    except NotReached as error:
        print(error, flush=True)
        return None


def campaign(
    times: int, first: int, at_once: int, output: Path, made: Callable[[int], Fault]
) -> None:
    """Inject so many faults, of which some run at once; figures are written after each."""
    began_s, figures = time.monotonic(), Figures()
    for fault, ends in cases(times, first, at_once, made):
        if ends is None:
            figures.not_reached += 1
        else:
            figures.add(fault, ends)
        result = figures.as_result() | {
            "minutes": round((time.monotonic() - began_s) / 60, 1),
            "first_seed": first,
            "at_once": at_once,
        }
        write_report(output, (__doc__ or "").splitlines()[0], result)


def main() -> None:
    """Run a campaign and write its figures, also of one that is stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--at-once", type=int, default=1, help="cases that run side by side")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--plans", action="store_true", help="of the cluster, in place of steps")
    asked = parser.parse_args()
    made = fault_of_plan if asked.plans else fault_of
    campaign(asked.times, asked.first, asked.at_once, asked.output, made)


if __name__ == "__main__":
    main()
