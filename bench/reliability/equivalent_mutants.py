"""Mutants that no test can kill, by their name in `bench.reliability.mutants`: why not."""

from __future__ import annotations

_AGAIN = "cotrain_compile/placement/check/recomputed.py check_recomputed"
_ANY_NUMBER = "versions of a buffer are only asked whether they are equal, and no two are"

EQUIVALENT: dict[str, str] = {
    f"{_AGAIN}: 1 -> 2": _ANY_NUMBER,
    f"{_AGAIN}: 0 -> 1 (number 2)": _ANY_NUMBER,
    f"{_AGAIN}: versions.get(name, 0) + 1 -> versions.get(name, 0) - 1": _ANY_NUMBER,
}
