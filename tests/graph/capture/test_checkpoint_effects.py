"""A checkpointed function fills a list of the step: as in eager, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cotrain_compile.errors import CaptureError


class Layers(nn.Module):
    """Each layer says what its output measures, beside what it returns."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor, told: list[Tensor]) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.run, layer, x, told, use_reentrant=self.reentrant)
        return x.square().mean()

    def run(self, layer: nn.Module, x: Tensor, told: list[Tensor]) -> Tensor:
        y = torch.tanh(layer(x))
        told.append(y.abs().mean())
        return x + y


def trained(run: Callable[..., Any], compiled: bool) -> tuple[Any, list[Tensor]]:
    """What two steps return, and the parameters then."""
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        result = run(model, x)
        optimizer.step()
        return result

    if compiled:
        step = torch.compile(step, backend="cotrain", options={"quiet": True})
    return [step(torch.ones(2, 4)) for _ in range(2)], list(model.parameters())


def sum_before(model: Layers, x: Tensor) -> Any:
    told: list[Tensor] = []
    loss = model(x, told) + sum(told)
    count = len(told)
    loss.backward()
    return loss.detach(), count


def by_name(model: Layers, x: Tensor) -> Any:
    """A closure adds to a list of several in a dictionary, and to the dictionary."""
    told: dict[str, Any] = {"measures": []}

    def inner(x: Tensor) -> Tensor:
        told["last"] = x.square()
        return model.run(model.layers[0], told["last"], told["measures"])

    loss = checkpoint(inner, x, use_reentrant=False).square().mean() + sum(told["measures"])
    (loss + told["last"].mean()).backward()
    return loss.detach()


@pytest.mark.parametrize("run", [sum_before, by_name])
def test_a_list_that_checkpoints_fill_is_as_in_eager(run: Callable[..., Any]) -> None:
    expected, found = trained(run, compiled=False), trained(run, compiled=True)
    torch.testing.assert_close(found, expected)


def read_behind(model: Layers, x: Tensor) -> Any:
    told: list[Tensor] = []
    loss = model(x, told) + sum(told)
    loss.backward()
    return loss.detach(), len(told)


def kept_in_the_model(model: Layers, x: Tensor) -> Any:
    told: list[Tensor] = []
    model.told = told  # type: ignore[assignment]
    loss = model(x, told)
    loss.backward()
    return loss.detach()


def of_the_caller(model: Layers, x: Tensor) -> Any:
    told: list[Tensor] = []

    def tell(x: Tensor) -> Tensor:
        return model(x, told)  # type: ignore[no-any-return]

    loss = tell(x)
    loss.backward()
    return tell(x).detach()


@pytest.mark.parametrize("run", [read_behind, kept_in_the_model, of_the_caller])
def test_what_is_read_behind_the_backward_is_refused(run: Callable[..., Any]) -> None:
    """Eager has filled it twice by then."""
    with pytest.raises(CaptureError, match=r"read behind backward\(\).*read it before backward"):
        trained(run, compiled=True)


SEEN: list[Tensor] = []


def of_the_script(model: Layers, x: Tensor) -> Any:
    SEEN.clear()
    loss = model(x, SEEN)
    loss.backward()
    return loss.detach()


def reentrant(model: Layers, x: Tensor) -> Any:
    """What eager fills the list with has no gradients."""
    model.reentrant = True
    return sum_before(model, x.requires_grad_())


def nested(model: Layers, x: Tensor) -> Any:
    told: list[Tensor] = []
    loss = checkpoint(model, x, told, use_reentrant=False)
    (loss + sum(told)).backward()
    return loss.detach()


@pytest.mark.parametrize("run", [of_the_script, reentrant, nested])
def test_what_a_checkpoint_may_not_fill_is_refused_with_a_way_on(run: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="Return from the checkpointed function what it keeps"):
        trained(run, compiled=True)
