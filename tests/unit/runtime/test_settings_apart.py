"""Numbers that are inputs of one rank's step alone are named, with the ranks."""

from __future__ import annotations

from cotrain_compile.distribute.agree import _read_apart


def test_numbers_that_have_changed_on_one_rank_alone_are_named() -> None:
    rate, decay = "param_groups.0.lr", "param_groups.0.weight_decay"
    told = f"{decay} is an input on rank 0 and a constant on ranks 1 and 2"
    assert _read_apart([(rate, decay), (rate,), (rate,)]) == [told]
    assert _read_apart([(rate, decay), (rate, decay)]) == []
