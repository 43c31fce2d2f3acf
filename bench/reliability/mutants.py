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
import ast
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
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.reliability.equivalent_mutants import EQUIVALENT

ROOT = Path(__file__).parents[2]
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
    "check of orders": Modules(("placement/check/ordered.py",), (f"{UNIT}/test_orders.py",)),
    "passes": Modules(("passes/*.py",), (f"{GRAPH}/passes",), ("torch", "torch._dynamo")),
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
}
OTHERS = ("pytest", "hypothesis", "numpy", "highspy", "pulp")
# What a comparison becomes, and an operator.
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
# Where the name of a test says nothing: what a mutant may take on top of the tests as they are.
SLOWER, LEAST_S = 4.0, 60.0


@dataclass(frozen=True)
class Mutant:
    """A file, in a function or class, with one place changed; `number` of those in the file.

    It is the `nth` there that reads the same before and after.
    """

    file: str
    where: str
    line: int
    before: str
    after: str
    number: int
    nth: int = 1

    @property
    def name(self) -> str:
        """What `EQUIVALENT` calls it: it says no line, as these change."""
        again = f" (number {self.nth})" if self.nth > 1 else ""
        return f"{self.file} {self.where}: {self.before} -> {self.after}{again}"


class _Mutator(ast.NodeTransformer):
    """Changes the place with this `number`, or counts and notes them all with none."""

    def __init__(self, file: str, number: int = -1) -> None:
        self.file, self.number = file, number
        self.found: list[Mutant] = []
        self.scope: list[str] = []

    def _offer(self, node: ast.AST, after: ast.AST | None) -> ast.AST | None:
        """`after` where it is the turn of this place, else `node`; None deletes it."""
        told = ast.unparse(after) if after is not None else "nothing"
        line: int = getattr(node, "lineno", 0)
        number = len(self.found)
        where = ".".join(self.scope) or "module"
        mutant = Mutant(self.file, where, line, ast.unparse(node), told, number)
        self.found.append(mutant)
        return after if number == self.number else node

    def _inside(self, node: ast.AST) -> ast.AST:
        """Only what runs: no annotations, defaults and decorators of what is defined."""
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        self.scope.append(node.name)
        node.body = [new for each in node.body if (new := self.visit(each)) is not None]
        node.body = node.body or [ast.Pass()]
        self.scope.pop()
        return node

    visit_FunctionDef = visit_ClassDef = _inside  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # words

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return node

    visit_ImportFrom = visit_Import  # type: ignore[assignment] # noqa: N815

    def visit_Compare(self, node: ast.Compare) -> ast.AST | None:
        self.generic_visit(node)
        if len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
            after = deepcopy(node)
            after.ops = [COMPARED[type(node.ops[0])]()]
            return self._offer(node, after)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST | None:
        self.generic_visit(node)
        after = deepcopy(node)
        after.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._offer(node, after)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST | None:
        self.generic_visit(node)
        return self._offer(node, node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST | None:
        self.generic_visit(node)
        if type(node.op) in OPERATORS:
            after = deepcopy(node)
            after.op = OPERATORS[type(node.op)]()
            return self._offer(node, after)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST | None:
        if isinstance(node.value, bool):
            return self._offer(node, ast.Constant(not node.value))
        if isinstance(node.value, int):
            return self._offer(node, ast.Constant(node.value + 1))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST | None:
        self.generic_visit(node)
        if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            after = deepcopy(node)
            after.args[:2] = after.args[1::-1]
            return self._offer(node, after)
        return node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return self._negated(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST | None:
        self.generic_visit(node)
        return self._negated(node)

    def _negated(self, node: ast.If | ast.IfExp) -> ast.AST:
        test = self._offer(node.test, ast.UnaryOp(ast.Not(), node.test))
        assert isinstance(test, ast.expr)
        node.test = test
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant):
            return node  # words
        self.generic_visit(node)
        return self._offer(node, ast.Pass())

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | None:
        self.generic_visit(node)
        return self._offer(node, ast.Pass())

    def visit_Return(self, node: ast.Return) -> ast.AST | None:
        self.generic_visit(node)
        return self._offer(node, ast.Return()) if node.value is not None else node

    def visit_Raise(self, node: ast.Raise) -> ast.AST | None:
        return self._offer(node, ast.Pass())

    def visit_Continue(self, node: ast.Continue) -> ast.AST | None:
        return self._offer(node, ast.Pass())


def mutants_of(file: str) -> list[Mutant]:
    """Every mutant of a file, named from the root of the repository."""
    mutator = _Mutator(file)
    mutator.visit(ast.parse((ROOT / file).read_text()))
    seen: Counter[str] = Counter()
    found = []
    for mutant in mutator.found:
        seen[mutant.name] += 1
        found.append(replace(mutant, nth=seen[mutant.name]))
    return found


def source_of(mutant: Mutant) -> str:
    """The file with that change."""
    tree = _Mutator(mutant.file, mutant.number).visit(ast.parse((ROOT / mutant.file).read_text()))
    return ast.unparse(ast.fix_missing_locations(tree))


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
