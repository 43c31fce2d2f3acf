"""States begin as zeros that take no memory, and are not copied to where they live."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.capture.state.optimizer_state import create_state
from cotrain_compile.capture.state.untouched import is_untouched_zero
from cotrain_compile.errors import HostMemoryError
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.cuda import homes
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from tests.support.thread_card import ThreadCard

ELEMENTS = 2**24  # 64 MiB


def states() -> list[Tensor]:
    """Fresh moments of an Adam, for a parameter that is not in memory either."""
    param = nn.Parameter(torch.empty(ELEMENTS))
    optimizer = torch.optim.Adam([param])
    create_state(optimizer)
    return [optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_fresh_states_take_no_memory() -> None:
    before = resident_bytes()
    made = states()
    assert resident_bytes() - before < 2**24
    assert all(state.shape == (ELEMENTS,) and state._base is None for state in made)


def test_an_untouched_state_is_made_again_at_its_home() -> None:
    card = ThreadCard()
    pool = PinnedPool(card.pin, card.unpin, lambda: 1 << 40)
    state = states()[0]
    homes.bring_home([(state, Tier.HOST)], card, pool)
    assert pool.holds(state)
    assert not state.any()


@pytest.mark.parametrize(
    "write", [lambda t: t.fill_(-0.0), lambda t: t.data.fill_(-0.0)], ids=["in place", "by .data"]
)
def test_a_state_that_was_written_is_copied(write: Callable[[Tensor], object]) -> None:
    state = states()[0]
    write(state)
    assert not is_untouched_zero(state)


def test_a_state_that_the_system_has_no_memory_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2**18))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    maps = iter([mmap.mmap])  # the first moment, and none for the second

    def map_once(*args: Any, **kwargs: Any) -> mmap.mmap:
        for real in maps:
            return real(*args, **kwargs)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    compiled = torch.compile(step, backend="cotrain", options={"quiet": True})
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", map_once)
        with pytest.raises(HostMemoryError, match=r"1\.0 MiB of host memory.*Free host memory"):
            compiled(torch.ones(3, 2))
    assert not optimizer.state
    first = compiled(torch.ones(3, 2))
    assert compiled(torch.ones(3, 2)) < first
