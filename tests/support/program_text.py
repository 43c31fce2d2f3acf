"""The rows of a small integer program as text, each kind under its formula in docs/placement.md.

In: a `DecisionSpace` and budgets. Out: text. A flow that nothing asks for is left out; a running
sum is written out where it is used. Beside a formula stands the function that adds its rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from unittest import mock

from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.strategies import Strategy
from cotrain_compile.placement.milp.linear import Row
from cotrain_compile.placement.milp.model import Model
from cotrain_compile.placement.milp.program import Program

# By the function that adds them: the formula, in the words of docs/placement.md.
FORMULAS: Mapping[str, str] = {
    "Model.__init__": "sum over s of z[c,s] = 1",
    "Total.__init__": "F(k) >= F(k-1)",
    "Total.at_most": "made first: F(k) <= what exists by the end of bucket k - L",
    "Total.at_least": "there in time: F(k - L) >= what is needed up to bucket k",
    "Total.not_before": "there in time: nothing before it may leave",
    "add_flows": "out before in: in(k) <= out(k - L)",
    "_add_gone": "gone after its last use: gone(k) <= out(k)",
    "_add_demands": "all of it: F(K) = everything that z and x send",
    "_add_host_pipeline": "host update: H <= h gradients(k - 1), weights(k) <= r H(k - 1)",
    "_add_stream": "streamed update: U(k) <= up(k - L), stored(k) <= d U(k - L)",
    "_add_device": "length: T[k] = ops[k] + s[k] + updates on the device in k",
    "_add_links_and_host": "down, up and host in k <= T[k]",
    "_add_end_of_step": "end of the step: T[K] >= way home of the largest update",
    "_workspaces": "memory: room in which the largest update runs",
    "_add_room_for_any_update": "memory: at home on the device + room for the update of c",
    "add_device_memory": "memory: at each checkpoint <= device budget",
    "add_host_memory": "host memory: homes, and copies in some buckets <= host budget",
}
_Row = tuple[dict[str, float], str, float]


def abridged(program: str) -> str:
    """Of each kind of rows of a program as text the last one, and how many there are before."""
    lines: list[str] = []
    for kind in program.split("\n\n"):
        head, *rows = kind.rstrip("\n").split("\n")
        lines += [head, *([f"    ... {len(rows) - 1} more"] * (len(rows) > 1)), *rows[-1:], ""]
    return "\n".join(lines[:-1]) + "\n"


def text(space: DecisionSpace, device_mib: float, host_mib: float, *, relaxed: bool) -> str:
    """The objective and all rows of the program."""
    added: list[tuple[str, Row]] = []
    add = Model.add

    def noted(model: Model, row: Row) -> None:
        added.append((sys._getframe(1).f_code.co_qualname, row))
        add(model, row)

    with mock.patch.object(Model, "add", noted):
        program = Program(space, device_mib, host_mib, relaxed=relaxed)
    names = [column.name for column in program.linear.columns]
    rows = [(name, _row(row, names)) for name, row in added]
    sums = {_sum_of(row): row for name, row in rows if name == "Model.running"}
    kept = [(name, _written_out(row, sums)) for name, row in rows if name != "Model.running"]
    empty = _empty_flows(row for name, row in kept if name == "_add_demands")
    return "\n".join(_lines(program, kept, empty)) + "\n"


def _lines(program: Program, rows: list[tuple[str, _Row]], empty: set[str]) -> Iterator[str]:
    spelled = _Spelled(program.space)
    terms, names = program.linear.objective.terms, [c.name for c in program.linear.columns]
    goal = {names[number]: c for number, c in terms.items() if c}
    yield spelled(f"minimise {_side({n: c for n, c in goal.items() if _flow(n) not in empty})}")
    for name in dict.fromkeys(name for name, _ in rows):
        own = [row for at, row in rows if at == name and _says(row, empty)]
        if not own:
            continue
        yield ""
        yield f"{FORMULAS[name]}    [{name}]"
        if name == "Total.__init__":
            flows = dict.fromkeys(_flow(variable) for row in own for variable in row[0])
            yield f"    of {', '.join(flows)}, for k = 1 ... {program.space.epilogue}"
            continue
        shown = dict.fromkeys(_shown(row, empty) for row in own)
        nothing = [line.removesuffix(" <= 0") for line in shown if re.fullmatch(r"\w+ <= 0", line)]
        if nothing:
            yield spelled(f"    {', '.join(nothing)} <= 0")
        yield from (spelled(f"    {line}") for line in shown if line[:-5] not in nothing)


class _Spelled:
    """Writes variables as the formulas do: z[w0,host], T[1], s[1], grad(1)."""

    def __init__(self, space: DecisionSpace) -> None:
        self.names = {
            f"z_{c}_{s}": f"z[{','.join(decision.cluster.params)},{_word(strategy)}]"
            for c, decision in enumerate(space.params)
            for s, strategy in enumerate(decision.strategies)
        }

    def __call__(self, line: str) -> str:
        return re.sub(r"\b([a-z]\w*)_(\d+)\b", self._name, line)

    def _name(self, found: re.Match[str]) -> str:
        flow, k = found.groups()
        letter = {"t": "T", "w": "s"}.get(flow)
        return self.names.get(found[0]) or (f"{letter}[{k}]" if letter else f"{flow}({k})")


def _word(strategy: Strategy) -> str:
    return f"{strategy.mode}{f' {strategy.fetches}' if strategy.fetches else ''}"


def _row(row: Row, names: Sequence[str]) -> _Row:
    """Its terms by variable, its sense, and the number on its right side."""
    terms = {names[number]: float(factor) for number, factor in row.terms.items() if factor}
    if row.low == row.high:
        return terms, "=", float(row.low)
    return (terms, "<=", float(row.high)) if isfinite(row.high) else (terms, ">=", float(row.low))


def _sum_of(row: _Row) -> str:
    """The newest sum in the row that says what it is."""
    return max((n for n in row[0] if n.startswith("sum_")), key=lambda n: int(n[4:]))


def _written_out(row: _Row, sums: Mapping[str, _Row]) -> _Row:
    """The row without sums."""
    terms, sense, number = dict(row[0]), row[1], row[2]
    while found := next((name for name in terms if name in sums), None):
        factor = terms.pop(found)
        inside, _, fixed = sums[found]
        number -= factor * fixed
        for name, other in inside.items():
            if name != found:
                terms[name] = terms.get(name, 0.0) - factor * other
    return {name: factor for name, factor in terms.items() if factor}, sense, number


def _flow(variable: str) -> str:
    return variable.rpartition("_")[0]


def _empty_flows(rows: Iterator[_Row]) -> set[str]:
    """The flows whose last total is nothing."""
    return {_flow(*terms) for terms, sense, number in rows if len(terms) == 1 and not number}


def _says(row: _Row, empty: set[str]) -> bool:
    """Whether a row is more than that nothing is nothing."""
    return any(_flow(name) not in empty for name in row[0])


def _shown(row: _Row, empty: set[str]) -> str:
    """What is positive on the left, what is negative on the right."""
    terms, sense, number = row
    known = {name: factor for name, factor in terms.items() if _flow(name) not in empty}
    left = {name: factor for name, factor in known.items() if factor > 0}
    right = {name: -factor for name, factor in known.items() if factor < 0}
    if not left:
        left, right, number = right, left, -number
        sense = {"<=": ">=", ">=": "<=", "=": "="}[sense]
    fixed = f"{number:.6g}" if abs(number) > 1e-12 else ""
    ends = " + ".join(filter(None, [_side(right), fixed]))
    return f"{_side(left)} {sense} {ends or '0'}".replace("+ -", "- ")


def _side(terms: Mapping[str, float]) -> str:
    return " + ".join(
        name if abs(factor - 1) < 1e-9 else f"{factor:.4g} {name}" for name, factor in terms.items()
    )
