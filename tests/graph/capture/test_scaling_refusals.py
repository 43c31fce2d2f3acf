"""What a captured `GradScaler` cannot skip is refused with nothing changed, and has a way on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cotrain_compile.errors import CaptureError
from tests.support.captured_steps import make_two_layers
from tests.support.scaled_steps import (
    SKIPPED,
    assert_close,
    batches,
    graphs,
    make_clipping,
    train,
)
from tests.support.steps import Step, cotrain


class CountingInPython(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            self.state[param]["count"] = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["count"] += 1
                    param.sub_(param.grad, alpha=group["lr"] / self.state[param]["count"])


def lazy_sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize(
    ("make_optimizer", "says"),
    [(CountingInPython, "keep them in tensors"), (lazy_sgd, "run the first step in eager")],
)
def test_an_optimizer_that_cannot_be_skipped_is_refused(
    make_optimizer: Callable[..., Optimizer], says: str
) -> None:
    model = make_two_layers().double()
    optimizer = make_optimizer(model.parameters())
    scaler = GradScaler("cpu")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    with pytest.raises(CaptureError, match=says):
        cotrain()(make_clipping(model, [optimizer], scaler))(*batches()[0])
    after = (model.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert scaler._scale is None


def test_the_first_step_in_eager_is_the_way_on_for_lazy_state() -> None:
    def make_switching(
        model: nn.Module, _: Sequence[Optimizer], scaler: GradScaler, ours: bool = True
    ) -> Step:
        plain = make_clipping(model, [lazy_sgd(model.parameters())], scaler)
        turns = iter([plain, *[cotrain()(plain) if ours else plain] * (len(SKIPPED) - 1)])
        return lambda *batch: next(turns)(*batch)

    def make_eager(model: nn.Module, _: Sequence[Optimizer], scaler: GradScaler) -> Step:
        return make_switching(model, _, scaler, ours=False)

    assert_close(train(make_switching), train(make_eager))
    assert graphs() == 1
