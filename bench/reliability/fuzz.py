"""Does anything break it? Random training programs, or damaged files, for so many minutes.

python -m bench.reliability.fuzz steps --minutes 60 -o bench/results/reliability_steps.json
python -m bench.reliability.fuzz files --minutes 10 -o bench/results/reliability_files.json

Cases run in processes of their own, so that a hang or a crash is a case that broke, and no more.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import write_report

# Of a processor, and on the clock: a case that computes for so long, or hangs, has broken. On a
# busy machine much of what passes on the clock is waiting for a processor.
CASE_CPU_S, CASE_S = 300, 1800
# Cases of one process: torch and Dynamo keep something of each.
IN_ONE = {"steps": 25, "files": 500, "sequences": 25}
TITLES = {
    "steps": "random training programs, in eager, captured and placed",
    "files": "damaged and hostile files, read by the command line",
}


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
    from tests.support.fuzz.fuzz_specs import random_spec

    torch.set_num_threads(1)
    return run(random_spec(seed)).status, ""


def work(kind: str, first: int) -> None:
    """Run `IN_ONE` cases; print each seed before it, and what came of it after it, as lines."""

    def bark(number: int, _: object) -> None:
        limit = f"{CASE_CPU_S} s of a processor" if number == signal.SIGPROF else f"{CASE_S} s"
        raise TimeoutError(f"still running after {limit}")

    for expired in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(expired, bark)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + IN_ONE[kind]):
            print(json.dumps([seed, "began", ""]), flush=True)
            signal.alarm(CASE_S)
            signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)
            try:
                status, message = run_case(kind, seed, Path(folder))
            except Exception as error:
                status, message = "broken", f"{type(error).__name__}: {error}"[:500]
            finally:
                signal.alarm(0)
                signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps([seed, status, message]), flush=True)


def campaign(kind: str, first: int, end_s: float) -> Iterator[tuple[int, str, str]]:
    """Seed, status and message of every case until `end_s` on the clock."""
    while time.monotonic() < end_s:
        began = first
        with _worker(kind, first) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                seed, status, message = json.loads(line)
                began, first = seed, seed + 1
                if status != "began":
                    yield seed, status, message
                if time.monotonic() > end_s:
                    return
            if worker.wait() != 0:
                yield began, "broken", f"the process ended with {worker.returncode}"


@contextmanager
def _worker(kind: str, first: int) -> Iterator[subprocess.Popen[str]]:
    """A process that runs cases from `first` on; it ends with the context."""
    command = [
        sys.executable,
        "-m",
        "bench.reliability.fuzz",
        kind,
        "--worker",
        "--first",
        str(first),
    ]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=silent, text=True) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def main() -> None:
    """Run a campaign and write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=tuple(IN_ONE))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.kind, asked.first)
        return
    if asked.kind not in TITLES:
        parser.error(f"{asked.kind}: python -m bench.reliability.api_sequences runs these")
    start_s = time.monotonic()
    counts: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    for seed, status, message in campaign(asked.kind, asked.first, start_s + 60 * asked.minutes):
        counts[status] += 1
        if status == "broken":
            broken.append({"seed": seed, "what": message})
        print(seed, status, message, flush=True)
        if asked.output is not None:  # a run that is stopped leaves what it has
            minutes = (time.monotonic() - start_s) / 60
            write(asked.output, asked.kind, asked.first, counts, broken, minutes)


def write(
    path: Path,
    kind: str,
    first: int,
    counts: Counter[str],
    broken: list[dict[str, Any]],
    minutes: float,
) -> None:
    """One campaign, with the fields that `bench.reliability.page` puts on a page."""
    result = {
        "campaign": TITLES[kind],
        "cases": counts.total() - counts["no program"],
        "held": counts["equal"] + counts["answered"],
        "refused": counts["refused"],
        "faults": 0,
        "broken": broken,
        "minutes": round(minutes, 1),
        "first_seed": first,
    }
    write_report(path, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
