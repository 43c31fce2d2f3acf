"""Hooks around `optimizer.step()` run in the captured step, as torch runs them in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cotrain_compile.errors import CaptureError
from tests.support.loops import EACH_POLICY, sgd
from tests.support.steps import Step, all_tensors, cotrain, cross_entropy, vectors


def plain(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def trained(compile_with: Callable[[Step], Step]) -> list[Any]:
    """Steps with one hook of each kind; the last of them comes when the step is compiled."""
    torch.manual_seed(0)
    model, average = nn.Linear(12, 4), nn.Linear(12, 4)
    optimizer = sgd(model)

    def clip(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert args == (optimizer,)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)

    def follow(*_: Any) -> None:
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)

    optimizer.register_step_pre_hook(clip)
    of_all = register_optimizer_step_post_hook(follow)
    step, left = compile_with(plain(model, optimizer)), []
    try:
        for call in range(4):
            if call == 2:
                optimizer.register_step_post_hook(clamp)
            left += [step(*vectors()), all_tensors(nn.ModuleList([model, average]), [optimizer])]
    finally:
        of_all.remove()
    return left


@pytest.mark.parametrize("policy", EACH_POLICY)
def test_hooks_of_one_optimizer_and_of_all_run_around_the_update(policy: str) -> None:
    ours = trained(cotrain(policy=policy, host_kernels="captured", lowering="eager"))
    assert counters["stats"]["unique_graphs"] == 2  # one more for the hook that came later
    torch.testing.assert_close(ours, trained(lambda step: step), rtol=0, atol=0)


class Around(SGD):
    """Torch runs its hooks around this step, and around the one within."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def with_scaler(model: nn.Module, optimizer: Optimizer) -> Step:
    scaler = GradScaler("cpu", init_scale=2.0)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize(
    ("kind", "hook", "make", "says"),
    [
        (SGD, lambda *_: ((), {}), plain, "let it return None"),
        (Around, lambda *_: None, plain, "around that of another class.*call them in the step"),
        (SGD, lambda *_: None, with_scaler, "GradScaler skips.*bfloat16 autocast"),
    ],
)
def test_hooks_that_a_graph_cannot_run_as_eager_does_are_refused(
    kind: type[SGD], hook: Any, make: Callable[[nn.Module, Optimizer], Step], says: str
) -> None:
    SGD([nn.Parameter(torch.zeros(1))])  # from then on torch runs hooks around its step
    model = nn.Linear(12, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(hook)
    with pytest.raises(CaptureError, match=says):
        cotrain()(make(model, optimizer))(*vectors())
