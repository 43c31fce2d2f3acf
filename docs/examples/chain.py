"""What the examples of several ranks train: layers in a chain, on samples that can be learned."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """A layer with its residual: what goes from one to the next is one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.inner(x))


class Model(nn.Module):
    """Layers, one behind the other."""

    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.last(x)
        return logits


def batch(number: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """16 samples of step `number`, others for each rank, and their classes."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :4].argmax(1)
