"""What tests of a disk share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.small_pieces import make_small


@pytest.fixture
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield
