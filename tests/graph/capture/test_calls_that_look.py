"""Calls of a step that train nothing: an early return by a flag, an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cotrain_compile.errors import CaptureError
from tests.support.loops import EACH_POLICY, sgd
from tests.support.steps import Step, all_tensors, check_peak, cotrain, cross_entropy, vectors

MakeStep = Callable[[nn.Module, torch.optim.Optimizer], Step]


def that_returns_early(look: Callable[[Tensor], Tensor]) -> MakeStep:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: Tensor, y: Tensor, trains: bool) -> Tensor:
            loss = cross_entropy(model, x, y)
            if not trains:
                return look(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make


def trained(make: MakeStep, compile_with: Callable[[Step], Step]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    optimizer = sgd(model)
    step, left = compile_with(make(model, optimizer)), []
    for trains in (False, True, False, True):
        left += [step(*vectors(), trains).detach(), all_tensors(model, [optimizer])]
    return left


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_a_call_that_returns_before_the_backward_is_captured_as_it_is(policy: str) -> None:
    make = that_returns_early(Tensor.detach)

    def compile_with(step: Step) -> Step:
        compiled = cotrain(policy=policy, host_kernels="captured", lowering="eager")(step)

        def run(*args: Any) -> Any:
            result = compiled(*args)
            check_peak(compiled)
            return result

        return run

    ours = trained(make, compile_with)
    assert counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(ours, trained(make, lambda step: step), rtol=0, atol=0)


def test_what_could_be_differentiated_outside_is_not_returned_detached_in_silence() -> None:
    make = that_returns_early(lambda loss: loss)
    with pytest.raises(CaptureError, match=r"no backward\(\).*torch.no_grad\(\).*loss.detach\(\)"):
        trained(make, cotrain())
