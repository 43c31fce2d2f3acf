"""Statistics in a checkpoint move as often as in eager, which runs it again for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cotrain_compile.errors import CaptureError
from tests.support.loops import EACH_POLICY, sgd
from tests.support.steps import Step, all_tensors, cotrain, vectors

Loss = Callable[[nn.Sequential, Tensor, Tensor], Tensor]


def in_two_parts(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """The second part finds the statistics as the backward of the first has left them."""
    _loss(model, checkpointed(model, x[:4]), y[:4]).backward()
    return _loss(model, checkpointed(model, x[4:]), y[4:])


def without_a_gradient(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """No backward goes through the checkpoint: it runs once in eager, too."""
    return _loss(model, checkpointed(model, x).detach(), y)


def twice_before_the_backward(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    return _loss(model, checkpointed(model, x) + checkpointed(model, x + 1), y)


def looked_at_before_the_backward(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    outputs = checkpointed(model, x)
    return _loss(model, outputs, y) * (1 + model.get_buffer("1.running_mean").clone().sum())


def within_another(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    outer = checkpoint(lambda x: checkpointed(model, x).sin(), x, use_reentrant=False)
    return _loss(model, outer, y)


def checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(model[:3], x, use_reentrant=False)
    return found


def _loss(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model[3](x), y)


def trained(loss_of: Loss, compile_with: Callable[[Step], Step]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    run, left = compile_with(step), []
    for _ in range(3):
        left += [run(*vectors()).detach(), all_tensors(model, [optimizer])]
    return left


@pytest.mark.parametrize("policy", EACH_POLICY)
@pytest.mark.parametrize("loss_of", [in_two_parts, without_a_gradient])
def test_statistics_in_a_checkpoint_are_eagers(loss_of: Loss, policy: str) -> None:
    ours = trained(loss_of, cotrain(policy=policy, host_kernels="captured", lowering="eager"))
    torch.testing.assert_close(ours, trained(loss_of, lambda step: step), rtol=0, atol=0)


@pytest.mark.parametrize(
    "loss_of", [twice_before_the_backward, looked_at_before_the_backward, within_another]
)
def test_statistics_that_would_move_in_another_order_are_refused(loss_of: Loss) -> None:
    with pytest.raises(
        CaptureError, match=r"test_checkpointed.* writes a buffer.*in evaluation mode"
    ):
        trained(loss_of, cotrain())
