"""A step that walks over its parameters is traced as if the walk was followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.capture.dynamo import patches, walks_of_parameters
from cotrain_compile.entry.tracing import trace_graph


class Tied(nn.Module):
    """A parameter under two names, a module under two names, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.again, self.nothing = self.first, None
        self.register_module("none", None)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), self.second)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.again(x)) * self.scale
        return out


class Backwards(Tied):
    """Names its modules in another order."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from reversed(list(super().named_modules(*args, **kwargs)))


def within(inner: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 3), inner())


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def weighed(model: nn.Module) -> None:
    for place, param in enumerate(model.parameters()):
        assert param.grad is not None
        param.grad.mul_(place)


def first_alone(model: nn.Module) -> None:
    parameters = model.parameters()
    first = next(parameters)
    assert first.grad is not None
    first.grad.mul_(2 + len(list(parameters)))


def own_alone(model: nn.Module) -> None:
    for param in model.parameters(recurse=False):
        assert param.grad is not None
        param.grad.mul_(2)


def text(make: Callable[[], nn.Module], walk: Callable[[nn.Module], None]) -> str:
    def build() -> Any:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters())

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            walk(model)
            optimizer.step()

        return step, (torch.ones(2, 3),)

    return trace_graph(build).text()


@pytest.mark.parametrize(
    ("make", "at_once", "walk"),
    [
        (Tied, True, clipped),
        (within(Backwards), False, clipped),
        pytest.param(within(Tied), True, weighed, marks=pytest.mark.long),
        pytest.param(within(Tied), True, first_alone, marks=pytest.mark.long),
        pytest.param(Tied, True, own_alone, marks=pytest.mark.long),
    ],
)
def test_the_graph_is_that_of_following_the_walk(
    make: Callable[[], nn.Module],
    at_once: bool,
    walk: Callable[[nn.Module], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[bool] = []
    parameters_of = walks_of_parameters._Walk.parameters_of

    def noted(self: Any, module: Any) -> Any:
        parameters = parameters_of(self, module)
        found.append(parameters is not None)
        return parameters

    monkeypatch.setattr(walks_of_parameters._Walk, "parameters_of", noted)
    walked = text(make, walk)
    assert found == ([] if walk is own_alone else [at_once])
    monkeypatch.setattr(patches, "parameters_walked", lambda: iter(()))
    assert text(make, walk) == walked
