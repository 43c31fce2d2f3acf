"""The bench of values made again: rows of a new run take the places of those they are of."""

from __future__ import annotations

from bench.plans.recompute import merged


def test_rows_of_a_part_are_put_among_those_that_are_there() -> None:
    kept = [{"model": "a", "share": 0.5, "overhead": 0.1}, {"model": "b", "share": 0.5}]
    found = [{"model": "a", "share": 0.5, "overhead": 0.2}, {"model": "c", "share": 0.4}]
    assert merged(found, kept, ("model", "share")) == [found[0], kept[1], found[1]]
