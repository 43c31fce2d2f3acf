"""Lines of golden cases: `name = call(arguments, key=value)`, read as data and never run.

In: a line. Out: its name and a `Call`. A word stands for itself, `a.b` for that text, `[..]` for a
list and `float32[2, 4]` for a `Shape`; numbers, True and None are what they are.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """`float32[2, 4]`."""

    dtype: str
    sizes: tuple[int, ...]


class Word(str):
    """A name in a line, as against a text in quotes."""

    __slots__ = ()


@dataclass(frozen=True)
class Call:
    """What a line calls, and with which arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def read_line(line: str) -> tuple[str, Call]:
    """The name and the call of `line`; ValueError where it has not this form."""
    name, equals, text = line.partition(" = ")
    text = re.sub(r"(\w)\[\]", r"\1[()]", text)  # the shape of a scalar
    call = ast.parse(text.strip(), mode="eval").body if equals else None
    if not isinstance(call, ast.Call):
        raise ValueError(f"{line!r} is no line `name = call(...)` of a golden case")
    kwargs = {str(word.arg): _value(word.value) for word in call.keywords}
    return name.strip(), Call(_dotted(call.func), tuple(map(_value, call.args)), kwargs)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name() | ast.Attribute():
            return Word(_dotted(node))
        case ast.List():
            return [_value(item) for item in node.elts]
        case ast.Subscript():
            return Shape(_dotted(node.value), _sizes(node.slice))
    return ast.literal_eval(node)


def _sizes(node: ast.expr) -> tuple[int, ...]:
    sizes = ast.literal_eval(node)
    return sizes if isinstance(sizes, tuple) else (sizes,)


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node)
