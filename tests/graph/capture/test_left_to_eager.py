"""With `on_break="warn"` each step that runs in eager is told, and none runs there beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import cotrain_compile
from tests.support.steps import cotrain

TOLD = "cotrain: the step runs in eager, without a budget. "


class Trainer:
    """Trains a layer; the step breaks the graph while `prints` is set."""

    def __init__(self, prints: bool) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.prints = prints

    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        if self.prints:
            torch._dynamo.graph_break()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def made_by_a_factory(prints: bool) -> Callable[[Tensor], Tensor]:
    trainer = Trainer(prints)

    def step(x: Tensor) -> Tensor:
        return trainer.step(x)

    return cotrain(on_break="warn", quiet=True)(step)


def method_of_an_object(prints: bool) -> Callable[[Tensor], Tensor]:
    return cotrain(on_break="warn", quiet=True)(Trainer(prints).step)


_decorated: Any = cotrain(on_break="warn", quiet=True)(Trainer.step)


def decorated_method(prints: bool) -> Callable[[Tensor], Tensor]:
    trainer = Trainer(prints)
    return lambda x: _decorated(trainer, x)


MADE = [made_by_a_factory, method_of_an_object, decorated_method]


def told_by(calls: Callable[[], Any], action: Any = "default") -> list[str]:
    """What Python shows of it to a program that has set no filter of its own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        calls()
    return [str(w.message) for w in caught if str(w.message).startswith(TOLD)]


def called(steps: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> None:
    for step in steps:
        step(x)


def test_another_step_of_the_same_code_is_told_too() -> None:
    x = torch.ones(3, 4)
    for make in MADE:
        torch._dynamo.reset()
        steps = [make(True) for _ in range(2)]
        for step in steps:
            assert len(told_by(partial(called, [step] * 3, x))) == 1
        assert not told_by(partial(called, steps, x), "always")


def test_another_step_of_the_same_code_that_does_not_break_is_compiled() -> None:
    x = torch.ones(3, 4)
    for make in MADE:
        torch._dynamo.reset()
        told_by(partial(called, [make(True)], x))
        step = make(False)
        assert not told_by(partial(called, [step] * 2, x))
        found = _decorated if make is decorated_method else step
        assert cotrain_compile.inspect(found).measured is not None, make.__name__


def test_a_reset_of_dynamo_tries_again() -> None:
    settings = SimpleNamespace(prints=True)
    trainer = Trainer(False)

    def step(x: Tensor) -> Tensor:
        if settings.prints:
            torch._dynamo.graph_break()
        return trainer.step(x)

    compiled, x = cotrain(on_break="warn", quiet=True)(step), torch.ones(3, 4)
    assert len(told_by(lambda: compiled(x))) == 1
    settings.prints = False
    torch._dynamo.reset()
    assert not told_by(lambda: compiled(x))
    assert cotrain_compile.inspect(compiled).measured is not None
