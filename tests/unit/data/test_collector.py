"""With the collector off nothing is collected; afterwards it is as the user had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cotrain_compile.support.collector import collector_off


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def test_nothing_is_collected_within_and_again_after_it() -> None:
    gc.enable()
    collections = sum(generation["collections"] for generation in gc.get_stats())
    with collector_off():
        kept = [[number] for number in range(100_000)]
        assert sum(generation["collections"] for generation in gc.get_stats()) == collections
    assert gc.isenabled()
    assert len(kept) == 100_000


def test_it_is_on_again_after_an_error() -> None:
    @collector_off()
    def fail() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    gc.enable()
    for _ in range(2):  # as a decorator it can be used again
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled()


def test_it_is_on_again_after_the_outer_of_two() -> None:
    gc.enable()
    with collector_off():
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_where_the_user_has_switched_it_off_it_stays_off() -> None:
    gc.disable()
    with collector_off():
        pass
    assert not gc.isenabled()
