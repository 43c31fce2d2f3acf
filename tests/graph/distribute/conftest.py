"""Ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks, ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    with ranks(3) as started:
        yield started
