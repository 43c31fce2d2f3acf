"""Damaged and hostile files: a document of ours in, one that somebody broke or bent out.

Bytes are cut, flipped and doubled; fields are left out, renamed, moved, and set to what a reader
may stumble over: numbers no float can hold, NaN, depth, names that look like paths, markup, half
characters and terminal commands.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]

MARKUP = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)//",
]
NAMES = [
    *MARKUP,
    "",
    "../../etc/passwd",
    "/dev/zero",
    "a\x00b",
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


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a document, but of its outermost object."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def bent(text: str, rng: random.Random) -> bytes:
    """`text`, a JSON document, with one to three fields that are not what they were."""
    document = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        _bend(document, rng)
    return json.dumps(document).encode()


def _bend(document: Any, rng: random.Random) -> None:
    path = rng.choice(list(places(document)) or [("data",)])
    parent, key = _at(document, path[:-1]), path[-1]
    how = rng.choice(["set", "set", "set", "drop", "double", "rename", "copy"])
    if how == "drop":
        parent.pop(key, None) if isinstance(parent, dict) else parent.pop(key)
    elif how == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif how == "rename" and isinstance(parent, dict):
        parent[rng.choice(NAMES)] = parent.pop(key, None)
    elif how == "copy":
        other = rng.choice(list(places(document)) or [()])
        parent[key] = copy.deepcopy(_at(document, other))
    else:
        parent[key] = copy.deepcopy(rng.choice([*NAMES, *NUMBERS, *OTHERS]))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


def damaged(text: str, rng: random.Random) -> bytes:
    """`text` after something happened to its bytes."""
    whole = text.encode()
    at = rng.randrange(len(whole))
    how = rng.choice(["cut", "flip", "drop", "double", "not a number", "two keys"])
    if how == "cut":
        return whole[:at]
    if how == "flip":
        return whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
    if how == "drop":
        return whole[:at] + whole[at + rng.randint(1, 64) :]
    if how == "double":
        return whole[:at] + whole[max(0, at - rng.randint(1, 64)) :]
    if how == "not a number":
        word = rng.choice([b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"0x10"])
        colon = whole.find(b":", at)
        return whole[: colon + 1] + word + whole[whole.find(b",", colon) :]
    return whole.replace(b"{", rng.choice([b'{"kind":"plan",', b'{"data":{},']), 1)
