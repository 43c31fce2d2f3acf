"""How far a trace is: calls while Dynamo follows the step, their share while they are lowered."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.capture import counts
from cotrain_compile.capture.offline.forked import in_a_copy
from cotrain_compile.entry.tracing import trace
from cotrain_compile.support.phases import is_listened, tell_phase, told_to


def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.ones(4, 8),)


def numbers(told: list[str], pattern: str) -> list[int]:
    """The number in each phase that `pattern` fits."""
    found = [re.search(pattern, phase) for phase in told]
    return [int(match[1].replace(",", "")) for match in found if match]


def test_a_trace_tells_its_calls_then_the_share_that_is_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counts, "EVERY", 1)
    told: list[str] = []
    with told_to(told.append):
        dataflow = trace(build)
    seen = numbers(told, r"1 of 3, .*: ([\d,]+) calls")
    assert set(seen) == set(range(max(seen) + 1))
    shares = numbers(told, r"2 of 3, .*: (\d+) %")
    (calls,) = set(numbers(told, r"2 of 3, .* of ([\d,]+) calls"))
    # Each call is run twice: to see what it writes, and to lower it.
    assert (len(shares), shares[0], shares[-1]) == (1 + 2 * calls, 0, 100)
    (ops,) = numbers(told, r"3 of 3, .*: ([\d,]+) ops")
    assert ops >= len(dataflow.ops)


def test_a_copy_of_the_process_tells_its_phases_here() -> None:
    told: list[str] = []

    def work() -> int:
        tell_phase("there")
        return 7

    with told_to(told.append):
        assert in_a_copy(work) == 7
    assert told == ["there"]
    assert not in_a_copy(is_listened)  # and where nobody listens, nothing is sent
