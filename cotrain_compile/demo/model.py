"""Model: a small character-level GPT in plain PyTorch. Nothing in it knows of this package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give 10.8 million parameters."""

    characters: int = 128
    context: int = 128
    width: int = 384
    layers: int = 6
    heads: int = 6


class Block(nn.Module):
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
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
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
