"""Do the tests hold that take too long for every run? Each file in full, and what came of it.

python -m bench.reliability.long_tests tests/unit -o bench/results/long_tests.json

Files are run as `make long` runs them: every test, and hypothesis with its long profile. What is in
the JSON already is kept for files that are not named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.report import write_report

ROOT = Path(__file__).parents[2]


def run_file(file: Path) -> dict[str, Any]:
    """Counts of one file: tests, those that failed by name, hypothesis' examples, minutes."""
    options = ["-m", "long or not long", "--hypothesis-profile=long"]
    options += ["--hypothesis-show-statistics", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", str(file), *options, f"--junitxml={written}"]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        if not written.exists():
            raise RuntimeError(f"pytest has not run {file}:\n{told[-2000:]}")
        return counts(written.read_text(encoding="utf-8"), told)


def counts(junit: str, told: str) -> dict[str, Any]:
    """The figures in pytest's XML and in the statistics that hypothesis has told."""
    suite = ElementTree.fromstring(junit).find("testsuite")
    assert suite is not None
    number = {name: int(suite.attrib[name]) for name in ("tests", "skipped")}
    return {
        "tests": number["tests"] - number["skipped"],
        "skipped": number["skipped"],
        "failed": list(_failed(suite)),
        "examples": sum(map(int, re.findall(r"(\d+) passing(?: examples)?,", told))),
        "minutes": round(float(suite.attrib["time"]) / 60, 1),
    }


def _failed(suite: ElementTree.Element) -> Iterator[str]:
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            yield case.attrib["name"]


def files_in(paths: Sequence[Path]) -> Iterator[Path]:
    """The files of tests among `paths`, and those in its folders."""
    for path in paths:
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else (path,)


def main() -> None:
    """Run the files and add their figures to the JSON, after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    for file in files_in(asked.paths):
        figures = run_file(file)
        print(file, figures, flush=True)
        known = json.loads(asked.output.read_text())["result"] if asked.output.exists() else {}
        known[str(file)] = figures
        write_report(asked.output, (__doc__ or "").splitlines()[0], dict(sorted(known.items())))


if __name__ == "__main__":
    main()
