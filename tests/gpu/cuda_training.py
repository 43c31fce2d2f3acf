"""Training on a CUDA device for tests: a model, where it is built, and its compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.machine import Tier
from tests.support.steps import CASES, SEED

WIDTH = 1024
CUDA = "cuda"


def make_wide(width: int = WIDTH, layers: int = 6) -> nn.Module:
    """Layers with dropout, of 4 MiB of weights each if nothing else is said."""
    of_one = (
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)
    )
    return nn.Sequential(*of_one)


def wide_batch(rows: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


class CudaTraining:
    """A model from a fixed seed, AdamW, and its step compiled with `options`.

    `built_on` is where the model is when the step is compiled; batches are on the card.
    """

    def __init__(
        self,
        name: str = "wide",
        *,
        built_on: str = CUDA,
        rows: int = 512,
        width: int = WIDTH,
        layers: int = 6,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(SEED)
        self.name, self.rows, self.width = name, rows, width
        made = make_wide(width, layers) if name == "wide" else CASES[name].make_model()
        self.model = made.train().to(built_on)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.compiled: Callable[..., Tensor] = torch.compile(
            self.eager, backend="cotrain", options=options
        )

    def eager(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.name == "wide":
            return F.mse_loss(self.model(x), y)
        return CASES[self.name].loss_of(self.model, x, y)

    def batch(self, rows: int | None = None) -> tuple[Tensor, ...]:
        wide = self.name == "wide"
        made = wide_batch(rows or self.rows, self.width) if wide else CASES[self.name].make_batch()
        return tuple(tensor.to(CUDA) for tensor in made)

    def run(self, step: Callable[..., Tensor] | None = None, steps: int = 4) -> list[Tensor]:
        """Losses of some steps, and parameters and states after them, on the CPU.

        What is on the host is read first, as soon as a step returns: all else waits for the card.
        """
        torch.manual_seed(SEED + 1)
        step = step or self.compiled
        losses = [step(*self.batch()).detach() for _ in range(steps)]
        tensors = self.tensors()
        read = {name: value.detach().clone() for name, value in tensors.items() if value.is_cpu}
        rest = (read.get(name, value.detach()) for name, value in tensors.items())
        return [value.cpu() for value in (*losses, *rest)]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer states by name, as they are."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        found = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for param, states in self.optimizer.state.items():
            found |= {f"{names[id(param)]}.{key}": value for key, value in states.items()}
        return found

    @property
    def inspected(self) -> CompiledStep:
        return cotrain_compile.inspect(self.compiled)

    def hosted(self) -> dict[str, Tensor]:
        """The tensors that the plan has at home on the host."""
        homes = self.inspected.plan.placement.homes
        return {n: t for n, t in self.tensors().items() if homes.get(n) is Tier.HOST}


def resident_peak_bytes(**settings: Any) -> int:
    """What the step needs on the device when everything stays there."""
    training = CudaTraining(policy="resident", **settings)
    training.run(steps=1)
    return training.inspected.predicted.peak_bytes[Tier.DEVICE]
