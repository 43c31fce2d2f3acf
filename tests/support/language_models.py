"""Language models with the losses that people train them with, as small steps.

A `LanguageModel` by what of its head and loss is unusual; out come a model, its step and a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


class TinyModel(nn.Module):
    """An embedding, an MLP with a norm before it, and a head, which may be the embedding's."""

    def __init__(self, vocabulary: int, width: int, *, tied: bool, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LanguageModel:
    """How the logits of a step become its loss."""

    tied: bool = False
    bias: bool = False
    smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0
    scale: float = 1.0
    reduction: str = "mean"
    is_bf16: bool = False
    is_shifted: bool = False
    is_transposed: bool = False  # classes before tokens
    micro_batches: int = 1
    chunks: int = 1  # by hand: each has its own head and cross entropy
    vocabulary: int = 96
    width: int = 16
    sequences: int = 4
    tokens: int = 12

    def model(self, dtype: torch.dtype = torch.float32) -> TinyModel:
        torch.manual_seed(3)
        made = TinyModel(self.vocabulary, self.width, tied=self.tied, bias=self.bias)
        return made.to(dtype)

    def batch(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = self.sequences, self.tokens
        tokens = torch.randint(0, self.vocabulary, shape, generator=generator)
        targets = torch.randint(0, self.vocabulary, shape, generator=generator)
        targets[:, :3] = IGNORED
        return tokens, targets

    def loss(self, model: TinyModel, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.chunks > 1:
            return self._loss_in_chunks(model, tokens, targets)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_bf16):
            logits = model(tokens)
        logits = logits * self.scale if self.scale != 1 else logits
        if self.soft_cap:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        logits = logits.float() if logits.dtype is torch.bfloat16 else logits
        if self.is_shifted:
            logits, targets = logits[:, :-1].contiguous(), targets[:, 1:].contiguous()
        if self.is_transposed:
            return F.cross_entropy(logits.transpose(1, 2), targets)
        flat = logits.view(-1, self.vocabulary)
        loss = F.cross_entropy(
            flat, targets.view(-1), label_smoothing=self.smoothing, reduction=self.reduction
        )
        if self.reduction == "sum":
            loss = loss / targets.numel()
        if self.z_loss:
            loss = loss + self.z_loss * torch.logsumexp(logits, -1).pow(2).mean()
        return loss

    def _loss_in_chunks(self, model: TinyModel, tokens: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(
            model.hidden(tokens).chunk(self.chunks, 1), targets.chunk(self.chunks, 1), strict=True
        )
        losses = [
            F.cross_entropy(model.head(own).flatten(0, 1), of.flatten(), reduction="sum")
            for own, of in pairs
        ]
        return torch.stack(losses).sum() / targets.numel()

    def step(
        self, model: TinyModel, optimizer: torch.optim.Optimizer
    ) -> Callable[[Tensor, Tensor], Tensor]:
        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            total = torch.zeros(())
            count = self.sequences // self.micro_batches
            for index in range(self.micro_batches):
                own = slice(index * count, (index + 1) * count)
                loss = self.loss(model, tokens[own], targets[own]) / self.micro_batches
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step


LANGUAGE_MODELS = {
    "plain": LanguageModel(),
    "tied": LanguageModel(tied=True),
    "bias": LanguageModel(bias=True),
    "smoothed": LanguageModel(smoothing=0.1),
    "z-loss": LanguageModel(z_loss=1e-3),
    "capped": LanguageModel(soft_cap=5.0, scale=0.5),
    "summed": LanguageModel(reduction="sum"),
    "bf16": LanguageModel(is_bf16=True),
    "everything": LanguageModel(
        tied=True, smoothing=0.1, z_loss=1e-3, soft_cap=5.0, scale=0.5, is_bf16=True
    ),
    "shifted": LanguageModel(is_shifted=True),
    "transposed": LanguageModel(is_transposed=True),
    "micro-batches": LanguageModel(micro_batches=2),
}
# The user has chosen parts of it.
IN_CHUNKS = LanguageModel(chunks=4)
