"""Symbolic sizes: a step captured with dynamic dimensions, at other values of them.

In: a Dataflow whose `expressions` hold sizes over its `symbols`. Out: the same step with the
numbers of other values (`at`), its peak as one expression (`peak_expression`), the largest batch
that fits (`largest`). The expressions are sympy source; they are read here by a small translator
that knows arithmetic and nothing else, because sympy's own parser runs its input as code.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from operator import add, mul, neg, pos, sub
from typing import Any

import sympy

from cotrain_compile.analysis.liveness import live_totals, liveness
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import FormatError, OptionError, PlacementError

_LONGEST_SOURCE = 10_000
_LARGEST_EXPONENT = 16


def _floor_divide(dividend: Any, divisor: Any) -> Any:
    if divisor == 0:
        raise ValueError("division by zero")
    return dividend // divisor


def _divide(dividend: Any, divisor: Any) -> Any:
    if divisor == 0:
        raise ValueError("division by zero")
    return dividend / divisor


def _modulo(dividend: Any, divisor: Any) -> Any:
    if divisor == 0:
        raise ValueError("division by zero")
    return dividend % divisor


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _modulo,
    ast.USub: neg,
    ast.UAdd: pos,
}
_NUMBER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": lambda *numbers: max(numbers),
    "Min": lambda *numbers: min(numbers),
    "Mod": _modulo,
    "IntTrueDiv": lambda dividend, divisor: _divide(Fraction(dividend), divisor),
    "CeilToInt": math.ceil,
}
_SYMBOL_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": _modulo,
    "IntTrueDiv": lambda dividend, divisor: _divide(sympy.sympify(dividend), divisor),
    "CeilToInt": sympy.ceiling,
}


def at(dataflow: Dataflow, values: Mapping[str, int]) -> Dataflow:
    """`dataflow` with its symbols set to `values` and every size that depends on them recomputed.

    Raises OptionError unless `values` gives each symbol of the dataflow, and nothing else, a
    positive integer; FormatError for an expression that cannot be read or a size below zero.
    """
    _check_values(dataflow, values)
    sizes = dataflow.expressions

    def evaluate(expressions: Mapping[str, str], name: str, default: int) -> int:
        return _size(expressions[name], values, name) if name in expressions else default

    return replace(
        dataflow,
        symbols=dict(values),
        job=dataflow.job if values == dataflow.symbols else replace(dataflow.job, batch={}),
        buffers=tuple(
            replace(buffer, nbytes=evaluate(sizes.buffer_nbytes, buffer.name, buffer.nbytes))
            for buffer in dataflow.buffers
        ),
        ops=tuple(
            replace(
                op,
                flops=evaluate(sizes.op_flops, op.name, op.flops),
                bytes_moved=evaluate(sizes.op_bytes_moved, op.name, op.bytes_moved),
            )
            for op in dataflow.ops
        ),
    )


def peak_expression(dataflow: Dataflow) -> sympy.Expr:
    """Peak bytes of the step over its symbols, which are positive integers of the same names.

    The maximum over all ops of the bytes alive there, without the ops that another one exceeds
    whatever the symbols are. Raises FormatError for an expression that cannot be read.
    """
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in dataflow.symbols}
    lifespans = liveness(dataflow).lifespans
    terms: dict[sympy.Expr, dict[str, int]] = {}
    for name, polynomial in _polynomials(dataflow, symbols).items():
        for term, factor in polynomial.items():
            terms.setdefault(term, {})[name] = factor
    columns = [
        live_totals(((lifespans[name], n) for name, n in sizes.items()), len(dataflow.ops))
        for sizes in terms.values()
    ]
    never_negative = [bool(term.is_nonnegative) for term in terms]
    rows = _undominated(set(zip(*columns, strict=True)), never_negative)
    totals = [
        sympy.Add(*(factor * term for factor, term in zip(row, terms, strict=True))) for row in rows
    ]
    # Left as it is: sympy would compare every two totals again, symbol by symbol.
    return sympy.Max(*totals, evaluate=False) if totals else sympy.Integer(0)


def largest(dataflow: Dataflow, symbol: str, budget_bytes: int, *, upper: int = 1 << 20) -> int:
    """The largest value of `symbol`, at most `upper`, at which the peak is within `budget_bytes`.

    Other symbols keep the values that `dataflow` has. Raises PlacementError when not even 1 fits,
    OptionError for an unknown symbol or when the peak falls while the symbol grows, so that one
    largest value does not answer the question.
    """
    if symbol not in dataflow.symbols:
        raise OptionError(f"unknown symbol {symbol!r}; {_known(dataflow)}")
    expression = peak_expression(dataflow)
    totals = expression.args if isinstance(expression, sympy.Max) else (expression,)
    unknowns = sorted(expression.free_symbols, key=str)
    totals_at = sympy.lambdify(unknowns, totals, "math")
    peaks: dict[int, int] = {}

    def fits(value: int) -> bool:
        sizes = {**dataflow.symbols, symbol: value}
        peaks[value] = int(max(totals_at(*(sizes[str(unknown)] for unknown in unknowns))))
        return peaks[value] <= budget_bytes

    if not fits(1):
        shortfall_bytes = peaks[1] - budget_bytes
        raise PlacementError(
            f"step needs {peaks[1]} bytes with {symbol} = 1, budget is {budget_bytes}: "
            f"{shortfall_bytes} bytes too few; raise the budget or shrink the model",
            shortfall_bytes=shortfall_bytes,
        )
    good, bad = 1, upper + 1
    while bad - good > 1:
        # Doubling first: the peak at huge values is of no interest when small ones are too large.
        value = min(2 * good, upper) if bad > upper else (good + bad) // 2
        if fits(value):
            good = value
        else:
            bad = value
    _check_growth(symbol, peaks)
    return good


def _check_values(dataflow: Dataflow, values: Mapping[str, int]) -> None:
    for name in sorted(values.keys() ^ dataflow.symbols.keys()):
        problem = "unknown symbol" if name in values else "no value for symbol"
        raise OptionError(f"{problem} {name!r}; {_known(dataflow)}")
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"symbol {name!r} is {value!r}; give it a positive integer")


def _known(dataflow: Dataflow) -> str:
    if not dataflow.symbols:
        return "this step has none: all its sizes are fixed"
    return f"the symbols of this step are {', '.join(sorted(dataflow.symbols))}"


def _check_growth(symbol: str, peaks: Mapping[int, int]) -> None:
    points = sorted(peaks.items())
    for (low, before), (high, after) in pairwise(points):
        if after < before:
            raise OptionError(
                f"peak falls from {before} to {after} bytes as {symbol} grows from {low} to "
                f"{high}, so no single largest value exists; check the values one by one with at()"
            )


def _polynomials(
    dataflow: Dataflow, symbols: Mapping[str, sympy.Symbol]
) -> dict[str, dict[sympy.Expr, int]]:
    """Size of each buffer as {term: integer factor}; fixed sizes are multiples of the term 1."""
    by_source: dict[str, dict[sympy.Expr, int]] = {}
    polynomials = {}
    for buffer in dataflow.buffers:
        source = dataflow.expressions.buffer_nbytes.get(buffer.name, str(buffer.nbytes))
        if source not in by_source:
            expression = sympy.sympify(_translate(source, symbols, buffer.name, _SYMBOL_FUNCTIONS))
            by_source[source] = _coefficients(sympy.expand(expression))
        polynomials[buffer.name] = by_source[source]
    return polynomials


def _coefficients(expression: sympy.Expr) -> dict[sympy.Expr, int]:
    return {term: int(factor) for term, factor in expression.as_coefficients_dict().items()}


def _undominated(
    rows: Iterable[tuple[int, ...]], never_negative: list[bool]
) -> list[tuple[int, ...]]:
    """The rows that no other row reaches in every column.

    Where a column's term may be negative, a larger factor is not larger: there both must be equal.
    """

    def exceeds(high: tuple[int, ...], low: tuple[int, ...]) -> bool:
        return all(
            h >= x if grows else h == x
            for h, x, grows in zip(high, low, never_negative, strict=True)
        )

    kept: list[tuple[int, ...]] = []
    for row in sorted(rows, key=lambda row: (-sum(row), row)):
        if not any(exceeds(other, row) for other in kept):
            kept.append(row)
    return kept


def _size(source: str, values: Mapping[str, int], where: str) -> int:
    size = int(_translate(source, values, where, _NUMBER_FUNCTIONS))
    if size < 0:
        raise FormatError(
            f"size of {where!r}: {source!r} is {size} at {values}; give values that make sense"
        )
    return size


def _translate(
    source: str,
    names: Mapping[str, Any],
    where: str,
    functions: Mapping[str, Callable[..., Any]],
) -> Any:
    """The value of the expression `source`, with `names` for its symbols, integers or sympy's.

    It may hold integers, names, + - * // % **, parentheses and calls of `functions`. Raises
    FormatError, which says that the expression belongs to `where`, for anything else.
    """
    if len(source) > _LONGEST_SOURCE:
        raise FormatError(f"size of {where!r}: expression of {len(source)} characters is too long")
    try:
        return _value(ast.parse(source.strip(), mode="eval").body, names, functions)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(
            f"size of {where!r}: cannot read {source[:80]!r} ({error}); make the file again"
        ) from None


def _value(
    node: ast.AST, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
) -> Any:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(op=ast.Pow(), left=base, right=ast.Constant(value=int() as exponent)):
            return _power(base, exponent, names, functions)
        case ast.BinOp(op=operator, left=left, right=right) if type(operator) in _OPERATORS:
            operands = (_value(side, names, functions) for side in (left, right))
            return reduce(_OPERATORS[type(operator)], operands)
        case ast.UnaryOp(op=operator, operand=operand) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_value(operand, names, functions))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in functions and args:
            return functions[name](*(_value(argument, names, functions) for argument in args))
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not known here")


def _power(
    base: ast.AST,
    exponent: int,
    names: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
) -> Any:
    """A small power; powers of powers are refused, since a short text could ask for any number."""
    nested = any(isinstance(part, ast.Pow) for part in ast.walk(base))
    if nested or not 0 <= exponent <= _LARGEST_EXPONENT:
        raise ValueError(f"powers go from 0 to {_LARGEST_EXPONENT} and are not nested")
    return _value(base, names, functions) ** exponent
