"""Does a fault cost more than it must? Faults everywhere, signals at any time, delays anywhere.

python -m bench.reliability.faults --minutes 60 -o bench/results/reliability_faults.json
python -m bench.reliability.faults --only delays -o bench/results/reliability_delays.json

Each case lets one fault, or one schedule, into steps, and holds if what is left is as documented
and the next step is right or refused. What has to hold is said in the tests that the cases are of.
"""

from __future__ import annotations

import argparse
import functools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from bench.report import write_report
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.runtime.process.signals import HELD
from tests.graph.capture import test_signals as signals
from tests.graph.passes import test_races as races
from tests.graph.robustness import test_every_fault as every
from tests.graph.robustness import test_every_write as writes
from tests.graph.runtime import test_watchdog as watchdog
from tests.support.captured_steps import TRAININGS, place
from tests.support.edges import edges
from tests.support.faults import SETTINGS, compiled_setting
from tests.support.faults_of_writes import WHEN, write_sites

CASE_S, TURN_S = 300, 10
SMALL = ("unclipped", "autocast", "autocast-unclipped", "tied")

Case = Callable[[], object]
Cases = Iterator[Case]
Report = Callable[[Counter[str], list[dict[str, str]]], None]


def _at_allocations(_: int) -> Cases:
    for name in SETTINGS:
        for number in range(every.allocations(name)):
            yield functools.partial(every.run_out_of_memory, name, number)


def _at_nodes(_: int) -> Cases:
    for name in SETTINGS:
        for number in range(len(every.nodes_that_run(compiled_setting(name)))):
            yield functools.partial(every.fail_at_node, name, number)


def _at_writes(_: int) -> Cases:
    for name in writes.NAMES:
        for number in range(len(write_sites(compiled_setting(name)))):
            for when in WHEN:
                yield functools.partial(writes.fail_at_write, name, number, when)


def _at_workers(_: int) -> Cases:
    for name in SETTINGS:
        for number in range(len(compiled_setting(name).plan.transfers)):
            yield functools.partial(every.kill_worker_at, name, number)


def _at_copies(_: int) -> Cases:
    for name in SETTINGS:
        for number in range(len(compiled_setting(name).plan.transfers)):
            yield functools.partial(watchdog.never_end, name, number)


def _interrupts(first: int) -> Cases:
    yield from _at_times(first, lambda name, rng, after_s: signals.press_ctrl_c(name, after_s))


def _handlers(first: int) -> Cases:
    yield from _at_times(
        first, lambda name, rng, after_s: signals.save_in_handler(name, rng.choice(HELD), after_s)
    )


def _at_times(first: int, send: Callable[[str, random.Random, float], object]) -> Cases:
    most_s = {name: 1.2 * signals.seconds_of_a_step(name) for name in SETTINGS}
    for seed in count(first):
        rng = random.Random(seed)
        for name in SETTINGS:
            yield functools.partial(send, name, rng, rng.random() * most_s[name])


def _delays(first: int) -> Cases:
    for seed in count(10_000 + first):
        for name in SMALL:
            for overlap in (False, True):
                test = races.test_delays_anywhere_change_no_bit
                yield functools.partial(test, name, seed, overlap)


def _checked_plans(first: int) -> Cases:
    for seed in count(10_000 + first):
        for name in TRAININGS:
            for overlap in (False, True):
                yield functools.partial(races.test_a_random_plan_is_in_no_race, name, seed, overlap)


def _edges_left_out(first: int) -> Cases:
    """Each edge of random plans: refused, or the step runs right with its task late."""
    for seed in count(10_000 + first):
        for overlap in (False, True):
            compiled = place("unclipped", races.plan_at_random("unclipped", seed, overlap=overlap))
            for edge in edges(compiled.graph):
                yield functools.partial(_leave_out, compiled, edge)


def _leave_out(compiled: Any, edge: Any) -> None:
    with edge.left_out():
        if find_race_in(compiled.graph) is None:
            races.check_late(compiled, "unclipped", edge)


# The cases of a kind; random ones from a seed on.
KINDS: dict[str, Callable[[int], Cases]] = {
    "out of memory at every allocation": _at_allocations,
    "an exception at every node": _at_nodes,
    "every write that fails": _at_writes,
    "a worker killed at every copy": _at_workers,
    "every copy that never ends": _at_copies,
    "Ctrl-C at a random time": _interrupts,
    "a handled signal at a random time": _handlers,
    "a schedule with random delays": _delays,
    "a random plan, checked for races": _checked_plans,
    "an edge of a plan left out": _edges_left_out,
}
# No fault is let into what is only checked.
WITHOUT_FAULT = "a random plan, checked for races"


def broken_by(case: Case) -> str:
    """What a case shows that should not be, "" where all is well."""
    signal.alarm(CASE_S)
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500] or type(error).__name__
    finally:
        signal.alarm(0)
    return ""


def campaign(
    seconds: float,
    only: str,
    first: int,
    report: Callable[[Counter[str], list[dict[str, str]]], None],
) -> None:
    """All kinds in turns of `TURN_S`, until the time is over; `report` after each turn."""
    counts, broken = Counter[str](), list[dict[str, str]]()
    end_s = time.monotonic() + seconds
    left = {kind: cases(first) for kind, cases in KINDS.items() if only in kind}
    while left and time.monotonic() < end_s:
        for kind, cases in list(left.items()):
            turn_ends_s = min(end_s, time.monotonic() + TURN_S)
            while kind in left and time.monotonic() < turn_ends_s:
                case = next(cases, None)
                if case is None:
                    del left[kind]
                    break
                what = broken_by(case)
                counts[kind] += 1
                if what:
                    broken.append({"kind": kind, "case": str(case), "what": what})
                    print(kind, case, what, flush=True)
            report(counts, broken)


def main() -> None:
    """Run a campaign and write its figures, also of one that is stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", default="", help="part of the names of kinds to try")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random case")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, bark)
    # Ignored in a process that a shell has put into the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began_s, what = time.monotonic(), asked.only or "faults, signals and delays"

    def report(counts: Counter[str], broken: list[dict[str, str]]) -> None:
        result = {
            "campaign": f"{what} in steps of every mode of placement",
            "cases": counts.total(),
            "held": counts.total() - len(broken),
            "refused": 0,
            "faults": counts.total() - counts[WITHOUT_FAULT],
            "broken": broken,
            "minutes": round((time.monotonic() - began_s) / 60, 1),
            "kinds": dict(counts),
            "first_seed": asked.first,
        }
        write_report(asked.output, (__doc__ or "").splitlines()[0], result)

    campaign(60 * asked.minutes, asked.only, asked.first, report)


def bark(*_: object) -> None:
    """A case that hangs is a broken one."""
    raise TimeoutError(f"still running after {CASE_S} s")


if __name__ == "__main__":
    main()
