"""GPTs for the GPU suite: their sizes, the training step, and the step captured to be placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cotrain_compile.capture.offline.only_trace import only_traced
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.graph import StepGraph

VOCABULARY = 50304


@dataclass(frozen=True)
class Size:
    """A GPT and its batch: `rows` sequences of the model's whole context."""

    shape: Shape
    rows: int

    @property
    def parameters(self) -> int:
        """With one more embedding for the head."""
        shape = self.shape
        return 12 * shape.layers * shape.width**2 + 2 * shape.characters * shape.width

    def batch(self, device: str) -> tuple[Tensor, Tensor]:
        """Random tokens on `device` and what follows them."""
        codes = torch.randint(self.shape.characters, (self.rows, self.shape.context + 1))
        codes = codes.to(device)
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()


def _gpt(width: int, layers: int, heads: int, rows: int) -> Size:
    return Size(Shape(VOCABULARY, 1024, width, layers, heads), rows)


SIZES = {
    "tiny": Size(Shape(128, 64, 64, 2, 4), 4),
    "350m": _gpt(1024, 24, 16, 8),
    "1b": _gpt(2048, 24, 16, 8),
    "3b": _gpt(2560, 32, 32, 8),
    "7b": _gpt(4096, 32, 32, 4),
}


class Training:
    """A GPT on `built_on` with AdamW, bfloat16 autocast and clipping; batches are on `device`."""

    def __init__(self, size: Size, device: str, *, built_on: str | None = None) -> None:
        self.size, self.device = size, device
        with torch.device("meta"):
            model = CharacterGPT(size.shape)
        self.model = _filled(model, device, built_on or device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)

    def step(self, tokens: Tensor, following: Tensor) -> Tensor:
        """One training step; the loss."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), following.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random tokens and what follows them."""
        return self.size.batch(self.device)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer states by name."""
        found: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            found[name] = param
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{name}.{key}"] = value
        return found

    def captured(self) -> tuple[StepGraph, list[Any]]:
        """The step as a graph, and the tensors it runs on: to be placed in many ways."""
        options: dict[str, Any] = {"device": "cuda"} if self.device == "cuda" else {}
        compiled: Callable[..., Any] = torch.compile(self.step, backend="cotrain", options=options)
        traced = only_traced(lambda: compiled(*self.batch()))
        assert traced is not None, "the step was not traced"
        return traced.step, list(traced.values)


def _filled(model: nn.Module, device: str, built_on: str) -> nn.Module:
    """`model` with small random weights, made one by one where that is fast."""
    model.to_empty(device=built_on)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            made = torch.empty(param.shape, device=device)
            is_scale = name.endswith("norm.weight")
            param.copy_(
                made.fill_(1.0) if is_scale else made.normal_(std=0.02, generator=generator)
            )
    return model
