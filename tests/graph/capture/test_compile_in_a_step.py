"""`torch.compile` in a step, as torchao's optimizers call it, also where a library wraps it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

find_handlers = TorchInGraphFunctionVariable._get_handlers


@pytest.fixture(params=["before the first trace", "behind it"])
def wrapped(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` as Lightning puts it there, known to Dynamo or not."""
    original = torch.compile

    @functools.wraps(original)
    def compile_and_note(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    find_handlers.cache_clear()
    if request.param == "behind it":
        find_handlers()
    monkeypatch.setattr(torch, "compile", compile_and_note)
    find_handlers()
    yield
    find_handlers.cache_clear()


def shrunk(weight: Tensor, rate: Tensor) -> Tensor:
    return weight * (1 - rate)


def step_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = (x @ weight).square().mean()
        loss.backward()
        assert weight.grad is not None
        with torch.no_grad():
            shrink = torch.compile(shrunk, fullgraph=True, dynamic=False)
            weight.copy_(shrink(weight, torch.tensor(0.1)) - 0.01 * weight.grad)
            weight.grad = None
        return loss.detach()

    return step


@pytest.mark.usefixtures("wrapped")
def test_what_is_compiled_in_a_step_is_traced() -> None:
    x, start = torch.randn(8, 4), torch.randn(4, 4)
    ours, eager = (start.clone().requires_grad_() for _ in range(2))
    run = torch.compile(step_of(ours), backend="cotrain", options={"quiet": True})
    expected = step_of(eager)
    for _ in range(2):
        run(x)
        with torch.compiler.set_stance("force_eager"):
            expected(x)
    torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)
