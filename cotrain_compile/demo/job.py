"""Job: the demo's model on the Python standard library's own sources, as a user would train it.

`training_step` is plain PyTorch; the only line about this package is the `torch.compile` in
`compiled`.

Model: a small character-level GPT in plain PyTorch. Nothing in it knows of this package.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[Tensor, Tensor], Tensor]

LEARNING_RATE = 3e-4
LARGEST_GRADIENT_NORM = 1.0
# Between the batches of one rank and of the next.
SEEDS_APART = 1_000


@dataclass(frozen=True)
class DemoJob:
    """A model with its optimizer, and the data it trains on: `rows` windows of `text` a step.

    `seed` is that of its batches, which differ from rank to rank.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    text: Tensor
    shape: Shape
    rows: int
    seed: int

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass(frozen=True)
class StepResult:
    """One step: its number from 0, its loss and how long it took."""

    number: int
    loss: float
    seconds: float


def standard_library() -> Tensor:
    """The modules at the top of the standard library as one run of ASCII codes (uint8).

    A character outside ASCII becomes "?".
    """
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
    codes = np.frombuffer(text.encode("ascii", errors="replace"), dtype=np.uint8)
    return torch.from_numpy(codes.copy())


def new_job(text: Tensor, *, shape: Shape, rows: int, seed: int) -> DemoJob:
    """A freshly initialised job: the same numbers for the same seed.

    In a process group its model is the group's, and its batches are those of this rank.
    """
    torch.manual_seed(seed)
    model: nn.Module = CharacterGPT(shape)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
        seed += SEEDS_APART * dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return DemoJob(model, optimizer, text, shape, rows, seed)


def training_step(job: DemoJob) -> Step:
    """One whole training step of `job`, in plain PyTorch."""
    model, optimizer = job.model, job.optimizer

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT_NORM)
        optimizer.step()
        return loss

    return step


def compiled(step: Step, options: dict[str, Any]) -> Step:
    """The same step, placed over device and host memory."""
    return torch.compile(step, backend="cotrain", options=options)


def train(job: DemoJob, step: Step, first: int, last: int) -> Iterator[StepResult]:
    """Run steps `first` to `last - 1`, one for each item taken."""
    for number in range(first, last):
        inputs, targets = batch(job.text, number, job.rows, job.shape.context, job.seed)
        started = time.perf_counter()
        loss = step(inputs, targets).item()
        yield StepResult(number, loss, time.perf_counter() - started)


def batch(text: Tensor, step: int, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, `(rows, length)` each, the targets one character ahead.

    They depend on `seed` and `step` alone.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give 10.8 million parameters."""

    characters: int = 128
    context: int = 128
    width: int = 384
    layers: int = 6
    heads: int = 6


class DecoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and around a skip connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        out: Tensor = x + self.mlp_out(hidden)
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class CharacterGPT(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.character = nn.Embedding(shape.characters, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits `(batch, length, characters)` for the codes `(batch, length)`."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.character(characters) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
