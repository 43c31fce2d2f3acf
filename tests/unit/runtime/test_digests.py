"""A digest of a tensor hangs on every bit, and on where it is; of a copy it is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.distribute.replicas import digest

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


@given(st.integers(1, 5000), st.sampled_from(DTYPES), st.integers(0, 7), st.data())
def test_any_changed_byte_is_seen(
    size: int, dtype: torch.dtype, offset: int, data: st.DataObject
) -> None:
    values = torch.arange(size + offset).to(dtype)[offset:]  # as in a buffer of several parameters
    changed = values.clone()
    assert int(digest(changed)) == int(digest(values))
    place = data.draw(st.integers(0, changed.numel() * changed.element_size() - 1))
    changed.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert int(digest(changed)) != int(digest(values))


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_small_and_turned_tensors_have_digests(shape: tuple[int, ...]) -> None:
    values = torch.rand(shape).mT if len(shape) == 2 else torch.rand(shape)
    assert int(digest(values)) == int(digest(values.clone()))
