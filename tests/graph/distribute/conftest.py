"""Ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.ranks import Ranks, ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    with ranks(3) as started:
        yield started


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with ranks(4) as started:
        yield started


@pytest.fixture(scope="session")
def five_ranks() -> Iterator[Ranks]:
    with ranks(5) as started:
        yield started


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    with ranks(8) as started:
        yield started


@pytest.fixture
def rank_of_four() -> Iterator[None]:
    """As `rank_of_two`, of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank_of_two() -> Iterator[None]:
    """A process group of two ranks, of which the other is not there and exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
