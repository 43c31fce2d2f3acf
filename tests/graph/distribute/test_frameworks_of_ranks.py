"""Training loops of frameworks on two ranks: the examples of the documentation give eager's losses.

Each rank is a process as torchrun starts it; the frameworks wrap the model in DDP.
"""

from __future__ import annotations

import pytest

from tests.support import frameworks_of_ranks
from tests.support.ranks import Ranks

# Rounding of one float32 step is 1e-5 of a loss.
ROUNDING = 5e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "steps"),
    [("hf_trainer", 4), ("accelerate_loop", 6)],
)
def test_a_loop_on_two_ranks_is_that_of_eager(two_ranks: Ranks, loop: str, steps: int) -> None:
    for eager, compiled, exchanges in two_ranks.run(frameworks_of_ranks.train, loop):
        assert len(compiled) == steps
        assert compiled == pytest.approx(eager, rel=ROUNDING)
        assert compiled[-1] < compiled[0]
        assert exchanges > 0
