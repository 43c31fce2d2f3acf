"""Steps of several micro-batches: small transformers whose layers are numbered modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.steps import VOCABULARY, Batch, Case, Step

WIDTH = 16


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to what came in."""

    def __init__(self, dropout: float, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        x = x + self.dropout(self.out(attended.squeeze(1)))
        return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, layers: int, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def autocast_loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, tokens, targets)


def make_batch() -> Batch:
    return torch.randint(VOCABULARY, (8, 5)), torch.randint(VOCABULARY, (8, 5))


@dataclass(frozen=True)
class MicroBatchCase:
    """How a step is accumulated: with `keeps`, gradients stay in `.grad`."""

    case: Case
    micro_batches: int
    optimizer: str = "adamw"
    clips: bool = False
    keeps: bool = False


def _case(layers: int, *, tied: bool = False, dropout: float = 0.0) -> Case:
    return Case(partial(Transformer, layers, tied=tied, dropout=dropout), make_batch, loss_of)


MICRO_BATCH_CASES = {
    "two-clipped": MicroBatchCase(_case(3), 2, clips=True),
    "four-tied": MicroBatchCase(_case(2, tied=True), 4, "sgd", clips=True),
    "four-kept": MicroBatchCase(_case(2), 4, keeps=True),
    "eight-autocast": MicroBatchCase(
        Case(partial(Transformer, 2), make_batch, autocast_loss_of), 8, "sgd"
    ),
    "dropout": MicroBatchCase(_case(2, dropout=0.1), 2),
}


def make_micro_batch_step(
    case: MicroBatchCase, model: nn.Module, optimizers: Sequence[Optimizer], loss_of: object
) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        count = case.micro_batches
        for x, y in zip(tokens.chunk(count), targets.chunk(count), strict=True):
            loss = case.case.loss_of(model, x, y) / count
            loss.backward()
            total = total + loss.detach()
        if case.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            if not case.keeps:
                optimizer.zero_grad()
        return total

    return step
