"""What a handler of the program's raises while a step is compiled comes out as it is."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from cotrain_compile.backends.inductor import lower
from tests.graph.backends.test_segments_of_steps import Interpreted


class TookTooLong(Exception):
    """A timeout of the program's own."""


def late(number: int, frame: FrameType | None) -> None:
    raise TookTooLong


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_timeout_while_a_step_is_compiled(lowering: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def interrupted(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGUSR2)

    options: dict[str, Any] = {"policy": "resident", "quiet": True, "lowering": lowering}
    compiled = torch.compile(step, backend="cotrain", options=options)
    before = signal.signal(signal.SIGUSR2, late)
    where = (
        mock.patch.object(lower, "compile_graph", interrupted)
        if lowering == "inductor"
        else mock.patch("cotrain_compile.entry.planner.plan_for", interrupted)
    )
    try:
        with where, pytest.raises(TookTooLong):
            compiled(torch.ones(2, 4))
        with mock.patch.object(lower, "compile_graph", Interpreted):
            compiled(torch.ones(2, 4))
    finally:
        signal.signal(signal.SIGUSR2, before)
