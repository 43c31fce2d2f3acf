"""Dataflow as lines for people: one line an op, then buffers, sizes and update groups.

In: a Dataflow. Out: text, from which `parse` makes the same Dataflow again. One op reads

    op mm_1 forward aten.mm.default (x w1) -> (h1) 4096 768 bfloat16 layers.1

with its flops, its bytes moved, its dtype and its module; `kept` says in the `.grad` of which
parameter a gradient is kept, `captured` which parameter the host updates without a fused loop.
Names are percent-encoded where they hold a space, a parenthesis or anything else that is not plain,
and an empty one is `-`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any
from urllib.parse import quote, unquote

from cotrain_compile.dataflow import (
    Buffer,
    Dataflow,
    Op,
    Phase,
    Role,
    SizeExpressions,
    UpdateGroup,
)
from cotrain_compile.errors import FormatError

_PLAIN = "/:,*+=<>[]@#!$&';?|^{}"
_ITEM = re.compile(r"\(([^()]*)\)|(\S+)")


def text(dataflow: Dataflow) -> str:
    """The lines of `dataflow`, ending in a newline."""
    return "\n".join(_lines(dataflow)) + "\n"


def parse(lines: str) -> Dataflow:
    """The Dataflow that `text` wrote. Raises FormatError with the number of the bad line."""
    parts: dict[str, list[Any]] = {key: [] for key in _FORMS}
    for number, line in enumerate(lines.splitlines(), start=1):
        keyword, _, rest = line.strip().partition(" ")
        if not keyword or keyword.startswith("#"):
            continue
        try:
            value = _read(keyword, _items(rest))
        except ValueError as error:
            raise FormatError(
                f"line {number}: {line.strip()[:80]!r} is no line of a dataflow ({error}); "
                "compare it with the output of text()"
            ) from None
        parts[keyword].append(value)
    if len(parts["dataflow"]) != 1:
        raise FormatError(
            f"found {len(parts['dataflow'])} lines 'dataflow FINGERPRINT', expected 1; "
            "give the text of one whole dataflow"
        )
    kept = dict(parts["kept"])
    captured = set(parts["captured"])
    return Dataflow(
        fingerprint=parts["dataflow"][0],
        ops=tuple(parts["op"]),
        buffers=tuple(replace(b, param=kept.get(b.name, "")) for b in parts["buffer"]),
        updates=tuple(replace(u, has_loop=u.param not in captured) for u in parts["update"]),
        symbols=dict(parts["symbol"]),
        expressions=_expressions(parts["size"]),
    )


def _lines(dataflow: Dataflow) -> Iterator[str]:
    yield f"dataflow {_word(dataflow.fingerprint)}"
    for symbol, value in dataflow.symbols.items():
        yield f"symbol {_word(symbol)} {value}"
    for op in dataflow.ops:
        yield (
            f"op {_word(op.name)} {op.phase} {_word(op.target)} {_group(op.reads)} -> "
            f"{_group(op.writes)} {op.flops} {op.bytes_moved} {_word(op.dtype)} {_word(op.module)}"
        )
    for buffer in dataflow.buffers:
        flags = [flag for flag in ("input", "output") if getattr(buffer, f"is_{flag}")]
        yield f"buffer {_word(buffer.name)} {buffer.nbytes} {buffer.role} {_group(flags)}"
    for buffer in dataflow.buffers:
        if buffer.param:
            yield f"kept {_word(buffer.name)} {_word(buffer.param)}"
    for kind in fields(SizeExpressions):
        for name, source in getattr(dataflow.expressions, kind.name).items():
            yield f"size {kind.name} {_word(name)} {_word(source)}"
    for group in dataflow.updates:
        yield (
            f"update {_word(group.param)} {_word(group.gradient)} {_word(group.low_precision)} "
            f"{_group(group.states)} {_group(group.scalars)} {_group(group.ops)}"
        )
        if not group.has_loop:
            yield f"captured {_word(group.param)}"


def _word(name: str) -> str:
    if name == "-":
        return "%2D"
    # surrogatepass: Python allows half a surrogate pair in a string, UTF-8 does not.
    return quote(name, safe=_PLAIN, errors="surrogatepass") or "-"


def _group(names: Iterable[str]) -> str:
    return f"({' '.join(map(_word, names))})"


def _items(rest: str) -> list[str | tuple[str, ...]]:
    """Words as strings and parenthesised groups as tuples, decoded."""
    items: list[str | tuple[str, ...]] = []
    for match in _ITEM.finditer(rest):
        group, word = match.groups()
        items.append(_decode(word) if word else tuple(map(_decode, group.split())))
    return items


def _decode(word: str) -> str:
    return "" if word == "-" else unquote(word, errors="surrogatepass")


def _read(keyword: str, items: list[str | tuple[str, ...]]) -> Any:
    """What one line says; ValueError when it has not the form of its keyword."""
    if keyword not in _FORMS:
        raise ValueError(f"it starts with none of {', '.join(_FORMS)}")
    form, reader = _FORMS[keyword]
    if [isinstance(item, tuple) for item in items] != [part[0] == "(" for part in form.split()]:
        raise ValueError(f"expected {keyword} {form}")
    return reader(*items)


def _read_op(
    name: str,
    phase: str,
    target: str,
    reads: tuple[str, ...],
    arrow: str,
    writes: tuple[str, ...],
    flops: str,
    bytes_moved: str,
    dtype: str,
    module: str,
) -> Op:
    if arrow != "->":
        raise ValueError("expected -> between reads and writes")
    return Op(
        name, target, Phase(phase), reads, writes, int(flops), int(bytes_moved), dtype, module
    )


def _read_buffer(name: str, nbytes: str, role: str, flags: tuple[str, ...]) -> Buffer:
    if not set(flags) <= {"input", "output"}:
        raise ValueError("flags are input and output")
    return Buffer(name, int(nbytes), Role(role), "input" in flags, "output" in flags)


def _read_update(
    param: str,
    gradient: str,
    low_precision: str,
    states: tuple[str, ...],
    scalars: tuple[str, ...],
    ops: tuple[str, ...],
) -> UpdateGroup:
    return UpdateGroup(param, gradient, states, scalars, ops, low_precision)


def _read_size(kind: str, name: str, source: str) -> tuple[str, str, str]:
    if kind not in {known.name for known in fields(SizeExpressions)}:
        raise ValueError(f"unknown size {kind!r}")
    return kind, name, source


# By keyword: the items of a line, groups in parentheses, and what makes a value of them.
_FORMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "dataflow": ("fingerprint", lambda fingerprint: fingerprint),
    "symbol": ("name value", lambda name, value: (name, int(value))),
    "op": ("name phase target (reads) -> (writes) flops bytes_moved dtype module", _read_op),
    "buffer": ("name nbytes role (flags)", _read_buffer),
    "kept": ("gradient param", lambda gradient, param: (gradient, param)),
    "size": ("kind name expression", _read_size),
    "update": ("param gradient low_precision (states) (scalars) (ops)", _read_update),
    "captured": ("param", lambda param: param),
}


def _expressions(sizes: Iterable[tuple[str, str, str]]) -> SizeExpressions:
    by_kind: dict[str, dict[str, str]] = {kind.name: {} for kind in fields(SizeExpressions)}
    for kind, name, source in sizes:
        by_kind[kind][name] = source
    return SizeExpressions(**by_kind)
