"""A small training that actions change from outside: model, optimizer, its steps, what hangs on it.

In: a `Setup`. Out: a `Training`, once in eager and once compiled. Both have a random state, a
default dtype and batches of their own, so that one action does the same in each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import cotrain_compile
from tests.support.fuzz.fuzz_compare import compiled_corrections

WIDTH, HIDDEN, CLASSES, ROWS = 6, 8, 3, 4
# Powers of these betas are exact in float32 for some steps: torch's compiled bias corrections, in
# float32, and the fused loops', in float64, are as good as one.
SOFT: dict[str, Any] = {"eps": 1e-2, "betas": (0.5, 0.75)}
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, SOFT),
    "Adam": (torch.optim.Adam, {**SOFT, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "plain SGD": (torch.optim.SGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"eps": 1e-2}),
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}
# How a step is written: what it does beside one forward, backward and update.
WRITTEN = (
    "plain",
    "clipped",
    "two micro-batches",
    "cleared last",
    "cleared to zeros",
    "returns much",
    "averages",
)


@dataclass(frozen=True)
class Setup:
    """What a sequence starts from."""

    norm: str = "layer"
    optimizer: str = "AdamW"
    written: str = "plain"
    dropout: float = 0.1
    options: Mapping[str, Any] = field(default_factory=dict)
    device_share: float | None = None


class Net(nn.Module):
    """Two layers with a norm between; `fails` says where its forward raises."""

    def __init__(self, norm: str, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.norm = NORMS[norm](HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.act: nn.Module = nn.Tanh()
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.fails = False
        self.register_buffer("shadow", torch.zeros(CLASSES))
        self.shadow: Tensor

    def head_weight(self) -> Tensor:
        """The bias of what is last in the head, which actions extend."""
        return list(self.head.parameters())[-1].detach().flatten()[:CLASSES]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.act(self.norm(self.first(x))))
        if self.fails:
            raise ValueError("the user's own code says no")
        return self.head(hidden)  # type: ignore[no-any-return]


Step = Callable[..., Any]


@dataclass
class Training:
    """One of the twins: `steps` are what calls run, the `plain` ones where nothing compiles."""

    setup: Setup
    compile_step: Callable[[Step], Step] | None
    model: Any
    optimizer: Any
    plain: dict[str, Step] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)
    scheduler: Any = None
    average: Any = None
    hooks: list[RemovableHandle] = field(default_factory=list)
    number: int = 0
    autocast: bool = False
    dtype: torch.dtype = torch.float64
    default_dtype: torch.dtype = torch.float32
    random_state: Tensor = field(default_factory=torch.get_rng_state)
    calls_compiled: bool = False
    was_cast: bool = False
    fails_late: bool = False
    kept: list[Tensor] = field(default_factory=list)

    def rebuilt(self) -> None:
        """Write the steps anew over `model` and `optimizer`, and compile each when it is called."""
        steps = make_steps(self)
        self.plain = {name: with_compiled_corrections(step) for name, step in steps.items()}
        self.steps = self.plain
        if self.compile_step is not None:
            self.steps = {name: self.compile_step(step) for name, step in steps.items()}

    def batch(self, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        """The next batch."""
        generator = torch.Generator().manual_seed(self.number)
        self.number += 1
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        return x.to(self.dtype), torch.randint(0, CLASSES, (rows,), generator=generator)

    def call(self, name: str, *batch: Tensor) -> Any:
        """Run a step, compiled where this twin is."""
        self.calls_compiled = True
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            returned = self.steps[name](*batch)
        cotrain_compile.synchronize()  # as what reads parameters from outside must do
        if not isinstance(returned, dict):  # which may hold what the step goes on to write
            self.kept.append(returned)
        return returned

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """With the random state and default dtype of this twin."""
        torch.set_rng_state(self.random_state)
        torch.set_default_dtype(self.default_dtype)
        try:
            yield
        finally:
            self.random_state = torch.get_rng_state()
            self.default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)

    def take(self, other: Training) -> None:
        """Become what `other` is: every tensor, the random state and the place in the data."""
        self.model.load_state_dict(other.model.state_dict())
        for mine, its in zip(self.parameters(), other.parameters(), strict=True):
            mine.grad = None if its.grad is None else its.grad.clone()
            self.optimizer.state.pop(mine, None)
            if its in other.optimizer.state:
                self.optimizer.state[mine] = copy.deepcopy(other.optimizer.state[its])
        self.random_state, self.number = other.random_state, other.number

    def parameters(self) -> list[Any]:
        """Those of the model and those that the optimizer knows, some twice."""
        listed = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [*self.model.parameters(), *listed]

    def tensors(self) -> dict[str, Tensor]:
        """Copies of all that training changes: parameters, buffers, gradients, states, averages."""
        found = dict(self.model.state_dict(keep_vars=True))
        named = {f"model.{name}": value for name, value in found.items()}
        names = {id(value): name for name, value in named.items()}
        for i, group in enumerate(self.optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                name = names.get(id(param), f"optimizer.{i}.{j}")
                named[name] = param
                for key, value in self.optimizer.state.get(param, {}).items():
                    named[f"{name} {key}"] = torch.as_tensor(value)
        params = [(name, value) for name, value in named.items() if isinstance(value, nn.Parameter)]
        named |= {f"{name}.grad": p.grad for name, p in params if p.grad is not None}
        if self.average is not None:
            named |= {f"average.{name}": v for name, v in self.average.state_dict().items()}
        named |= {f"kept {i}": value for i, value in enumerate(self.kept) if value is not None}
        named["random state"] = self.random_state
        return {name: value.detach().clone() for name, value in named.items()}


def make_training(setup: Setup, compile_step: Callable[[Step], Step] | None) -> Training:
    """The twin that compiles its steps by `compile_step`, or the one in eager."""
    torch.manual_seed(0)
    model = Net(setup.norm, setup.dropout).double()
    kind, settings = OPTIMIZERS[setup.optimizer]
    optimizer = kind(model.parameters(), lr=1e-2, **settings)  # type: ignore[call-arg]
    training = Training(setup, compile_step, model, optimizer)
    training.rebuilt()
    return training


def with_compiled_corrections(step: Step) -> Step:
    """`step` with the bias corrections of compiled optimizers, whose counts are float32."""

    def corrected(*batch: Tensor) -> Any:
        with compiled_corrections():
            return step(*batch)

    return corrected


def make_steps(training: Training) -> dict[str, Step]:
    """The step of the setup; one of another loss; gradients alone, and the update from them."""
    model, optimizer, written = training.model, training.optimizer, training.setup.written

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def train(x: Tensor, y: Tensor) -> Any:
        if written != "cleared last":
            optimizer.zero_grad(set_to_none=written != "cleared to zeros")
        loss = loss_of(x, y)
        loss.backward()
        if written == "two micro-batches":
            loss_of(x.flip(0), y).backward()
        if training.fails_late:
            raise ValueError("the user's own code says no to these gradients")
        if written == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if written == "cleared last":
            optimizer.zero_grad()
        if written == "averages":
            with torch.no_grad():
                model.shadow.lerp_(model.head_weight(), 0.5)
        if written == "returns much":
            return {"loss": loss.item(), "x": x, "weight": model.norm.weight, "twice": loss * 2}
        return loss

    def other(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    def collect(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        loss.backward()
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {"train": train, "other": other, "collect": collect, "update": update}
