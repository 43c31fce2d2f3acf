"""Does anything break it? Random training programs, or damaged files, for so many minutes.

python -m bench.reliability.fuzz steps --minutes 60 -o bench/results/reliability_steps.json
python -m bench.reliability.fuzz files --minutes 10 -o bench/results/reliability_files.json

Cases run in processes of their own, so that a hang or a crash is a case that broke, and no more.
Of some programs the one is run that tries most kinds of ops, and pairs of one that reads another's
result, that were tried least. Every other program is compiled by Inductor: those of odd seeds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import write_report

# Of a processor, and on the clock: a case that computes for so long, or hangs, has broken. On a
# busy machine much of what passes on the clock is waiting for a processor.
CASE_CPU_S, CASE_S = 300, 1800
# Cases of one process: torch and Dynamo keep something of each.
IN_ONE = {"steps": 25, "files": 500, "sequences": 25}
# Programs of which the one that tries most of what is new is run.
CANDIDATES = 6
KINDS = ("a program whose ops run as captured", "a program compiled by Inductor")
TITLES = {
    "steps": "random training programs, in eager, captured and placed, chosen by what is new",
    "files": "damaged and hostile files, read by the command line",
}


@dataclass(frozen=True)
class Case:
    """One case: its seed, "began" or what came of it, and what it tried, see `fuzz_coverage`."""

    seed: int
    status: str
    message: str = ""
    tried: Sequence[str] = ()


def choose(kind: str, number: int, seen: Counter[str]) -> tuple[int, Sequence[str]]:
    """The seed of case `number`: of some that tries most of what was `seen` least; what it tries.

    All of them are even, or all odd: half of the programs are compiled.
    """
    if kind != "steps":
        return number, ()
    from tests.support.fuzz.fuzz_coverage import newest
    from tests.support.fuzz.fuzz_specs import APART
    from tests.support.fuzz.fuzz_ways import campaign_spec

    specs = [campaign_spec(number + i * APART) for i in range(CANDIDATES)]
    spec, tried = newest(specs, seen)
    return spec.seed, sorted(tried)


def run_case(kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """The status of one case, and what is told of it; raises where a promise is broken."""
    if kind == "files":
        from tests.support.fuzz.fuzz_commands import case, with_files

        return case(with_files(folder), seed), ""
    if kind == "sequences":
        from tests.support.sequences.lock_step import run as run_sequence
        from tests.support.sequences.sequence import random_sequence

        done = run_sequence(random_sequence(seed))
        told = json.dumps({"held": done.held, "refused": done.refused})
        return "refused" if done.refused else "equal", told
    import torch

    from tests.support.fuzz.fuzz_run import run
    from tests.support.fuzz.fuzz_ways import campaign_spec

    torch.set_num_threads(1)
    outcome = run(campaign_spec(seed))
    return outcome.status, outcome.way


def work(kind: str, first: int, seen: Counter[str]) -> None:
    """Run `IN_ONE` cases; print each before it, and what came of it after it, as lines."""

    def bark(number: int, _: object) -> None:
        limit = f"{CASE_CPU_S} s of a processor" if number == signal.SIGPROF else f"{CASE_S} s"
        raise TimeoutError(f"still running after {limit}")

    for expired in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(expired, bark)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + IN_ONE[kind]):
            seed, tried = choose(kind, number, seen)
            seen.update(tried)
            print(json.dumps(asdict(Case(seed, "began", tried=tried))), flush=True)
            signal.alarm(CASE_S)
            signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)
            try:
                status, message = run_case(kind, seed, Path(folder))
            except Exception as error:
                status, message = "broken", f"{type(error).__name__}: {error}"[:500]
            finally:
                signal.alarm(0)
                signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(asdict(Case(seed, status, message, tried))), flush=True)


def campaign(
    kind: str, first: int, end_s: float, seen: Counter[str] | None = None
) -> Iterator[Case]:
    """Every case until `end_s` on the clock; what they try is added to `seen`."""
    seen = Counter() if seen is None else seen
    while time.monotonic() < end_s:
        running = Case(first, "began")
        with _worker(kind, first, seen) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                case = Case(**json.loads(line))
                if case.status == "began":
                    running, first = case, first + 1
                    continue
                seen.update(case.tried)
                yield case
                if time.monotonic() > end_s:
                    return
            if worker.wait() != 0:
                what = f"the process ended with {worker.returncode}"
                yield replace(running, status="broken", message=what)


@contextmanager
def _worker(kind: str, first: int, seen: Counter[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that runs cases from `first` on; it ends with the context."""
    command = [
        sys.executable,
        "-m",
        "bench.reliability.fuzz",
        kind,
        "--worker",
        "--seed-from",
        str(first),
    ]
    with tempfile.NamedTemporaryFile("w+") as counts:
        json.dump(seen, counts)
        counts.seek(0)  # the worker reads from here on
        with subprocess.Popen(
            command,
            stdin=counts,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as worker:
            try:
                yield worker
            finally:
                worker.kill()


def main() -> None:
    """Run a campaign and write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=tuple(IN_ONE))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed-from", type=int, default=0, help="number of the first case")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.kind, asked.seed_from, Counter(json.load(sys.stdin)))
        return
    if asked.kind not in TITLES:
        parser.error(f"{asked.kind}: python -m bench.reliability.api_sequences runs these")
    start_s = time.monotonic()
    cases: list[Case] = []
    seen: Counter[str] = Counter()
    for case in campaign(asked.kind, asked.seed_from, start_s + 60 * asked.minutes, seen):
        cases.append(replace(case, tried=()))
        print(case.seed, case.status, case.message, flush=True)
        if asked.output is not None:  # a run that is stopped leaves what it has
            result = figures_of(asked.kind, cases, seen)
            minutes = round((time.monotonic() - start_s) / 60, 1)
            result |= {"minutes": minutes, "first_seed": asked.seed_from}
            write_report(asked.output, (__doc__ or "").splitlines()[0], result)


def figures_of(kind: str, cases: Sequence[Case], seen: Counter[str]) -> dict[str, Any]:
    """One campaign, with the fields that `bench.reliability.page` puts on a page."""
    counts = Counter(case.status for case in cases)
    result = {
        "campaign": TITLES[kind],
        "cases": counts.total() - counts["no program"],
        "held": counts["equal"] + counts["answered"],
        "refused": counts["refused"],
        "faults": 0,
        "broken": [{"seed": c.seed, "what": c.message} for c in cases if c.status == "broken"],
    }
    if kind == "steps":
        from tests.support.fuzz.fuzz_coverage import figures

        programs = [case for case in cases if case.status != "no program"]
        kinds = Counter(KINDS[case.seed % 2] for case in programs)
        held = (case.message for case in cases if case.status == "equal" and case.message)
        result["kinds"] = kinds + Counter(f"{way}, held" for way in held)
        result["coverage"] = figures(seen)
    return result


if __name__ == "__main__":
    main()
