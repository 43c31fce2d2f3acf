"""A throttled link keeps its own time: what its thread is late by never adds up."""

from __future__ import annotations

from functools import partial

import pytest

from cotrain_compile.runtime import network
from cotrain_compile.runtime.network import ThrottledLink


def test_copies_end_when_the_link_has_passed_them_however_late_its_thread_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    until: list[float] = []
    monkeypatch.setattr(network, "sleep_until", until.append)
    link = ThrottledLink()
    done: list[str] = []
    # Three are there from 10 s on, another one from 20 s; the link takes 1 s for each.
    for name, ready_s in (("a", 10.0), ("b", 10.0), ("c", 10.0), ("d", 20.0)):
        link.carry(partial(done.append, name), ready_s, 1.0, 0.25)
    assert until == [10.75, 11.0, 11.75, 12.0, 12.75, 13.0, 20.75, 21.0]
    assert done == ["a", "b", "c", "d"]
