"""Do the tests see it when the program is wrong? The source is changed in one place at a time.

python -m bench.reliability.mutants --modules check passes --sample 150 --seed 1 \\
    -o bench/results/reliability_mutants.json

In: modules of `TESTS`. Out: JSON for `bench.reliability.page`, by module: how many mutants there
are, how many were run and killed, and which survived. What is in the JSON for other modules is
kept. Each mutant runs the tests of its module alone, up to the first that fails, in a copy of the
repository, in a process that has imported only what is not of this package. A mutant that hangs is
killed, in both senses. One in `EQUIVALENT` computes the same, for the reason that is told there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.reliability.equivalent_mutants import EQUIVALENT
from bench.reliability.mutator import ROOT, Mutant, mutants_of, source_of

PACKAGE = "cotrain_compile"
UNIT, GRAPH = "tests/unit/placement", "tests/graph"


@dataclass(frozen=True)
class Modules:
    """Files of the package that are tested together, and the tests that concern them.

    `needs` is imported once, before the first mutant. The tests in `then` take longer: they are run
    where the others pass.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


TESTS = {
    "check": Modules(
        tuple(
            f"placement/check/{name}.py"
            for name in ("check", "copies", "replay", "rules", "run_order")
        ),
        (f"{UNIT}/test_check.py", f"{UNIT}/test_unusual_steps.py", f"{UNIT}/test_exchanges.py"),
        then=tuple(f"{UNIT}/test_{name}.py" for name in ("speculation", "overlap", "orders")),
    ),
    "check of values made again": Modules(
        ("placement/check/recomputed.py",), (f"{UNIT}/test_check_recomputed.py",)
    ),
    "check of orders": Modules(("placement/check/check.py",), (f"{UNIT}/test_orders.py",)),
    "passes": Modules(
        ("passes/*.py",),
        (f"{GRAPH}/passes",),
        ("torch", "torch._dynamo"),
        then=(f"{GRAPH}/distribute/test_gather_again.py",),
    ),
    "fused loops": Modules(
        ("runtime/host/fused_loops.py",),
        (
            f"{GRAPH}/runtime/test_host_kernels.py::test_every_setting_of_a_fused_optimizer_keeps_its_loop",
        ),
        ("torch", "torch._dynamo"),
        then=(f"{GRAPH}/runtime/test_host_kernels.py", f"{GRAPH}/updates/test_hyperparameters.py"),
    ),
    "host": Modules(
        ("runtime/host/[!f]*.py", "runtime/host/fused_kernel.py"),  # all but the fused loops
        (f"{GRAPH}/runtime/test_host_kernels.py", f"{GRAPH}/runtime/test_pieces.py"),
        ("torch", "torch._dynamo"),
        then=(f"{GRAPH}/updates",),
    ),
    "what ranks compare": Modules(
        ("distribute/replicas.py", "distribute/same_numbers.py"),
        tuple(
            f"tests/unit/runtime/test_{name}.py"
            for name in ("same_on", "same_numbers", "digests", "settings_apart")
        ),
        ("torch", "torch._dynamo"),
        then=(f"{GRAPH}/distribute/test_agree.py",),
    ),
}
OTHERS = ("pytest", "hypothesis", "numpy", "highspy", "pulp")
# Where the name of a test says nothing: what a mutant may take on top of the tests as they are.
SLOWER, LEAST_S = 4.0, 60.0


class Copy:
    """A copy of the repository in `folder`, in which mutants are tested one by one."""

    def __init__(self, folder: Path, modules: Modules) -> None:
        self.folder, self.modules = folder, modules
        skipped = shutil.ignore_patterns(".*", "__pycache__", "results")
        shutil.copytree(ROOT, folder, ignore=skipped, dirs_exist_ok=True)
        for name in (*OTHERS, *modules.needs):
            importlib.import_module(name)

    def must_pass(self) -> None:
        """Ends the program where the tests fail without a mutant."""
        if failed := self._all(10_000.0):
            print((self.folder / "log.txt").read_text())
            sys.exit(f"{failed} fails without a mutant: mend that first")

    def killed_by(self, mutant: Mutant, limit_s: float) -> str:
        """The test that fails, or "time"; empty where all pass."""
        path = self.folder / mutant.file
        path.write_text(source_of(mutant))
        try:
            return self._all(limit_s)
        finally:
            shutil.copyfile(ROOT / mutant.file, path)

    def _all(self, limit_s: float) -> str:
        then = self.modules.then
        return self._test(self.modules.tests, limit_s) or (
            self._test(then, limit_s) if then else ""
        )

    def _test(self, tests: tuple[str, ...], limit_s: float) -> str:
        log = self.folder / "log.txt"
        child = os.fork()
        if not child:
            self._run(log, tests)
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return "" if status == 0 else _failed(log.read_text())
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "time"

    def _run(self, log: Path, tests: tuple[str, ...]) -> None:
        """In a process of its own, which ends here."""
        code = 1
        try:
            os.setpgid(0, 0)
            os.chdir(self.folder)
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            sys.path = [str(self.folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.dont_write_bytecode = True
            for name in [n for n in sys.modules if n.partition(".")[0] in ("bench", "tests")]:
                del sys.modules[name]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long", "--tb=no"]
            options += ["--assert=plain"]  # pytest is imported already
            code = int(importlib.import_module("pytest").main([*options, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _failed(log: str) -> str:
    words = ("FAILED ", "ERROR ")
    told = (line.split()[1] for line in log.splitlines() if line.startswith(words))
    return next(told, "the tests could not begin")


def run_again(
    name: str, figures: dict[str, Any], minutes: float, tests: Sequence[str] = ()
) -> dict[str, Any]:
    """`figures` of an earlier run, whose survivors without a reason meet the tests of today.

    Or `tests` alone, see `_narrowed`.
    """
    modules, began = _narrowed(TESTS[name], tests), time.monotonic()
    known = {mutant.name: mutant for mutant in _mutants(modules)}
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), modules)
        copy.must_pass()
        for each in figures["survived"]:
            told = each | {"because": EQUIVALENT.get(each["what"], "")}
            late = time.monotonic() - began > 60 * minutes
            if late or told["because"] or not copy.killed_by(known[each["what"]], 10 * LEAST_S):
                survived.append(told)
            print(
                f"{'SURVIVED' if told in survived else 'killed'}: {each['what']}"[:300], flush=True
            )
    return {key: figures[key] for key in ("mutants", "run", "seed", "minutes")} | {
        "killed": figures["run"] - len(survived),
        "equivalent": sum(bool(each["because"]) for each in survived),
        "survived": survived,
    }


def _narrowed(modules: Modules, tests: Sequence[str]) -> Modules:
    """With `tests` alone, if any: what some kill, all kill. What survives is to meet the others."""
    return replace(modules, tests=tuple(tests), then=()) if tests else modules


def _mutants(modules: Modules) -> list[Mutant]:
    package = ROOT / PACKAGE
    files = sorted({file for pattern in modules.files for file in package.glob(pattern)})
    return [m for file in files for m in mutants_of(str(file.relative_to(ROOT)))]


def run(
    name: str,
    sample: int,
    seed: int,
    minutes: float = float("inf"),
    tests: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Figures of the modules called `name`, after each mutant of a random `sample`."""
    modules, began = _narrowed(TESTS[name], tests), time.monotonic()
    found = _mutants(modules)
    chosen = random.Random(seed).sample(found, min(sample, len(found)))
    killed = 0
    survived: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), modules)
        copy.must_pass()
        limit_s = LEAST_S + SLOWER * (time.monotonic() - began)
        for number, mutant in enumerate(chosen, start=1):
            by = copy.killed_by(mutant, limit_s)
            killed += bool(by)
            if not by:
                told = {"what": mutant.name, "at": f"{mutant.file}:{mutant.line}"}
                survived.append(told | {"because": EQUIVALENT.get(mutant.name, "")})
            print(f"{number}/{len(chosen)} {by or 'SURVIVED'}: {mutant.name}"[:300], flush=True)
            yield {
                "mutants": len(found),
                "run": number,
                "killed": killed,
                "equivalent": sum(bool(each["because"]) for each in survived),
                "survived": survived,
                "seed": seed,
                "minutes": round((time.monotonic() - began) / 60, 1),
            }
            if time.monotonic() - began > 60 * minutes:
                return


def _write(output: Path, result: dict[str, Any]) -> None:
    """In a process of its own: reports import the package, which this process must not have."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        from bench.report import write_report

        write_report(output, "Do the tests see it when the program is wrong?", result)
    finally:
        os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line names, and write the figures after each group of modules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--again", action="store_true", help="the survivors in the JSON alone")
    parser.add_argument("--tests", nargs="+", default=(), help="these alone, not all of TESTS")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    known = json.loads(asked.output.read_text())["result"] if asked.output.exists() else {}
    for name in asked.modules:
        if asked.again:
            known[name] = run_again(name, known[name], asked.minutes, asked.tests)
            _write(asked.output, known)
            continue
        for figures in run(name, asked.sample, asked.seed, asked.minutes, asked.tests):
            known[name] = figures
        _write(asked.output, known)


if __name__ == "__main__":
    main()
