"""Mutants: a file of Python with one place changed, so that it may compute something else.

In: a file of the repository. Out: every place of it that can be changed, and its source with one.
"""

from __future__ import annotations

import ast
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
