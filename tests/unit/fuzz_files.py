"""Damaged and hostile files: a document of ours in, one that somebody broke or bent out.

Bytes are cut, flipped and doubled; fields are left out, renamed, moved, and set to what a reader
may stumble over: numbers no float can hold, NaN, depth, names that look like paths, markup, half
characters and terminal commands.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]

NAMES = [
    "",
    "../../etc/passwd",
    "/dev/zero",
    "a\x00b",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)//",
    "\x1b]0;owned\x07\x1b[2J",
    "\u202egnp.exe",
    "[red]not markup[/red]",
    "{{ 7 * 7 }}{% raw %}",
    "%s%n{0}",
    "a\r\nb",
    '"] shape=none; "x',
    "__import__('os').system('true')",
    "é" * 5000,
]
NUMBERS = [0, -1, 1, 2**31, 2**63, 10**30, 10**400, 0.0, -1.5, 1e308, 5e-324]
OTHERS = [None, True, [], {}, DEEP, [[]], {"": {}}]
hostile = st.sampled_from([*NAMES, *NUMBERS, *OTHERS])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a document, but of its outermost object."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


@st.composite
def bent(draw: st.DrawFn, text: str) -> bytes:
    """`text`, a JSON document, with one to three fields that are not what they were."""
    document = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places(document), key=str)))
        _bend(draw, document, path)
    return json.dumps(document).encode()


def _bend(draw: st.DrawFn, document: Any, path: tuple[Any, ...]) -> None:
    parent, key = document, path[-1]
    for part in path[:-1]:
        parent = parent[part]
    how = draw(st.sampled_from(["set", "set", "set", "drop", "double", "rename", "copy"]))
    if how == "drop":
        del parent[key]
    elif how == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif how == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from(NAMES))] = parent.pop(key)
    elif how == "copy":
        other = document
        for part in draw(st.sampled_from(sorted(places(document), key=str))):
            other = other[part]
        parent[key] = copy.deepcopy(other)
    else:
        parent[key] = draw(hostile)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> bytes:
    """`text` after something happened to its bytes."""
    whole = text.encode()
    at = draw(st.integers(0, len(whole) - 1))
    how = draw(st.sampled_from(["cut", "flip", "drop", "double", "not a number", "two keys"]))
    if how == "cut":
        return whole[:at]
    if how == "flip":
        return whole[:at] + bytes([whole[at] ^ (1 << draw(st.integers(0, 7)))]) + whole[at + 1 :]
    if how == "drop":
        return whole[:at] + whole[at + draw(st.integers(1, 64)) :]
    if how == "double":
        return whole[:at] + whole[max(0, at - draw(st.integers(1, 64))) :]
    if how == "not a number":
        word = draw(st.sampled_from([b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"0x10"]))
        colon = whole.find(b":", at)
        return whole[: colon + 1] + word + whole[whole.find(b",", colon) :]
    return whole.replace(b"{", draw(st.sampled_from([b'{"kind":"plan",', b'{"data":{},'])), 1)
