"""What an idiom is, and the words in which the other modules of this folder write them down.

Most idioms change one place of a plain step: its model, its loss, its gradients between `backward`
and `step`, or its parameters after `step`. Such an idiom is the few lines that differ. The others
write the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Step = Callable[..., Any]
Batch = tuple[Any, ...]

ROWS, WIDTH, OUT = 8, 6, 4
CALLS = 4


@dataclass
class Training:
    """A step with its batches, and all that training changes: modules, optimizers, tensors."""

    step: Step
    batches: list[Batch]
    watched: list[nn.Module | Optimizer | Tensor]
    compiles: float = math.inf  # no more graphs than these, however many steps


@dataclass(frozen=True)
class Idiom:
    """`make` builds the program anew, from the seed that is set.

    An idiom that cannot be captured has `instead`, the program that a user gets who follows the
    advice of the refusal, and `advice`, words that the refusal must hold.
    """

    name: str
    topic: str
    make: Callable[[], Training]
    advice: str = ""
    instead: Callable[[], Training] | None = None


@dataclass
class Parts:
    """What the places of a plain step can reach."""

    model: nn.Module
    optimizer: Optimizer
    start: list[Tensor] = field(default_factory=list)  # the parameters before the first step
    extra: list[Tensor] = field(default_factory=list)  # zeros like the parameters

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return [p for p in self.model.parameters() if p.requires_grad]


IDIOMS: dict[str, Idiom] = {}
Edit = Callable[[Parts], None]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def add(idiom: Idiom) -> None:
    """Have `idiom` among those that are run."""
    assert idiom.name not in IDIOMS, f"two idioms are called {idiom.name}"
    IDIOMS[idiom.name] = idiom


# What a plain step is made of.


def mlp() -> nn.Module:
    """Two layers, smooth, in float64."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUT)).double()


def adamw(model: nn.Module) -> Optimizer:
    """AdamW at a rate at which a few steps show."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum and decay."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adagrad(model: nn.Module) -> Optimizer:
    """Adagrad."""
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def adam(model: nn.Module) -> Optimizer:
    """Adam with its decay in the gradient."""
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.05)


OPTIMIZERS = (adamw, sgd, adagrad, adam)
_next_optimizer = cycle(OPTIMIZERS)


def regression(rows: int = ROWS, calls: int = CALLS) -> list[Batch]:
    """Inputs and targets for every call."""
    return [
        (torch.randn(rows, WIDTH).double(), torch.randn(rows, OUT).double()) for _ in range(calls)
    ]


def classes(rows: int = ROWS, calls: int = CALLS) -> list[Batch]:
    """Inputs and classes for every call."""
    return [
        (torch.randn(rows, WIDTH).double(), torch.randint(0, OUT, (rows,))) for _ in range(calls)
    ]


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The squared error."""
    return F.mse_loss(model(x), y)


def plain(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Loss = mse,
    batches: list[Batch] | None = None,
    after_backward: Edit | None = None,
    after_step: Edit | None = None,
) -> Training:
    """`zero_grad`, loss, `backward`, an edit, `step`, an edit."""
    start = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    parts = Parts(model, optimizer, start, [torch.zeros_like(p) for p in start])

    def step(x: Any, y: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        if after_backward is not None:
            after_backward(parts)
        optimizer.step()
        if after_step is not None:
            after_step(parts)
        return value

    return Training(step, batches or regression(), [model, optimizer, *parts.extra])


# Decorators: each turns the lines that differ into an idiom.


def gradient_edit(edit: Edit) -> Edit:
    """What happens to gradients between `backward` and `step`."""
    make_optimizer = next(_next_optimizer)

    def make() -> Training:
        model = mlp()
        return plain(model, make_optimizer(model), after_backward=edit)

    add(Idiom(_name(edit), "gradients", make))
    return edit


def parameter_edit(edit: Edit) -> Edit:
    """What happens to parameters after `step`."""
    make_optimizer = next(_next_optimizer)

    def make() -> Training:
        model = mlp()
        return plain(model, make_optimizer(model), after_step=edit)

    add(Idiom(_name(edit), "parameters", make))
    return edit


def loss_idiom(batches: Callable[[], list[Batch]] = regression) -> Callable[[Loss], Loss]:
    """A loss of model, inputs and targets."""

    def register(loss: Loss) -> Loss:
        make_optimizer = next(_next_optimizer)

        def make() -> Training:
            model = mlp()
            return plain(model, make_optimizer(model), loss=loss, batches=batches())

        add(Idiom(_name(loss), "losses", make))
        return loss

    return register


def model_idiom(
    batches: Callable[[], list[Batch]] = regression, loss: Loss = mse
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """A model, with the batches that it reads."""

    def register(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        make_optimizer = next(_next_optimizer)

        def make() -> Training:
            model = make_model().double()
            return plain(model, make_optimizer(model), loss=loss, batches=batches())

        add(Idiom(_name(make_model), "models", make))
        return make_model

    return register


def optimizer_idiom(make_optimizer: Callable[[nn.Module], Optimizer]) -> Callable[..., Optimizer]:
    """An optimizer and its settings."""

    def make() -> Training:
        model = mlp()
        return plain(model, make_optimizer(model))

    add(Idiom(_name(make_optimizer), "optimizers", make))
    return make_optimizer


def program(topic: str) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """A whole training program."""

    def register(make: Callable[[], Training]) -> Callable[[], Training]:
        add(Idiom(_name(make), topic, make))
        return make

    return register


def refused(
    advice: str, instead: Callable[[], Training]
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """A program that may be refused in words that hold `advice`; followed, they give `instead`."""

    def register(make: Callable[[], Training]) -> Callable[[], Training]:
        add(Idiom(_name(make), "refusals", make, advice, instead))
        return make

    return register


def _name(function: Callable[..., Any]) -> str:
    return function.__name__.strip("_").replace("_", " ")
