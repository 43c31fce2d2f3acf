"""Layers for random models: each maps (rows, width) to (rows, width) and is odd in one way.

In: the kind of a layer, a width and a dtype. Out: a module. What is odd is how a parameter lies in
memory or is used, what kind of buffer there is, or what the ops do with storages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.fuzz.fuzz_layouts import LAYOUTS, Function


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Checkpointed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class CheckpointedDropout(Residual):
    """What is drawn in a checkpoint is drawn again for the backward, alike."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._dropped, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _dropped(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2, self.training))


class Branches(nn.Module):
    """Halves of one result, as views, go different ways and come together again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, dim=-1)
        return value.t().t() * torch.sigmoid(gate) + value.detach()  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """Overwrites its own result, and columns of it through a view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += 1
        y[:, ::2].mul_(0.5)
        y.relu_()
        return y  # type: ignore[no-any-return]


class ScalarParameter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class EmptyParameter(nn.Module):
    """A parameter of no elements, in use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x @ self.none.t()], dim=1) * 0.9


class UnusedParameter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Transposed(nn.Module):
    """A parameter in column order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).t() / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Strided(nn.Module):
    """A parameter that is every other column of a larger storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(width, 2 * width) / width**0.5)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Neighbours(nn.Module):
    """Two parameters that are parts of one storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        both = torch.randn(2, width)
        self.scale, self.shift = nn.Parameter(both[0]), nn.Parameter(both[1])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Frozen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Buffers that a step writes: a running mean and an integer; one that it reads."""

    mean: Tensor
    calls: Tensor
    mask: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.arange(width) % 3 > 0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.calls += 1
        return torch.where(self.mask, x - self.mean, 0.5 * x)


class OtherPrecision(nn.Module):
    """Computes in another dtype than its neighbours."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(width, width) / width**0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.to(self.weight.dtype) @ self.weight).to(x.dtype)


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        return self.conv(x.view(rows, 2, width // 2)).reshape(rows, width)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Rows attend to each other, in two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        q, k, v = self.qkv(x).view(rows, 3, 2, width // 2).permute(1, 2, 0, 3).unsqueeze(1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + seen[0].transpose(0, 1).reshape(rows, width)


class CheckpointedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Gathered(nn.Module):
    """Columns in another order, by an index that is a buffer; the parameter is used twice."""

    order: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(width).flip(0))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale)[:, self.order] + self.scale.cumsum(0) / x.shape[1]


def _noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "no bias": lambda width: nn.Linear(width, width, bias=False),
    "residual": Residual,
    "checkpointed": Checkpointed,
    "branches": Branches,
    "in place": InPlace,
    "scalar parameter": ScalarParameter,
    "empty parameter": EmptyParameter,
    "unused parameter": UnusedParameter,
    "transposed": Transposed,
    "strided": Strided,
    "neighbours": Neighbours,
    "frozen": Frozen,
    "counting": Counting,
    "float64": lambda width: OtherPrecision(width, torch.float64),
    "bfloat16": lambda width: OtherPrecision(width, torch.bfloat16),
    "convolution": Convolution,
    "attention": Attention,
    "gathered": Gathered,
    "layer norm": nn.LayerNorm,
    "batch norm": nn.BatchNorm1d,
    "group norm": lambda width: nn.GroupNorm(2, width),
    "prelu": lambda width: nn.PReLU(width),
    "dropout": lambda width: nn.Dropout(0.2),
    "noise": lambda width: Function(_noise),
    "relu in place": lambda width: Function(lambda x: F.relu_(x + 0.1)),
    "softmax": lambda width: Function(lambda x: x + x.softmax(-1)),
    "sorted": lambda width: Function(lambda x: x + x.sort(dim=-1).values),
    "view": lambda width: Function(lambda x: x.view(-1, 2, width // 2).mT.reshape(-1, width)),
}
# Those that only some ways draw, see `fuzz_ways`: no seed of `random_spec` has them.
RUNS: dict[str, Callable[[int], nn.Module]] = {
    "checkpointed dropout": CheckpointedDropout,
    "checkpointed attention": CheckpointedAttention,
}
# Uses the first layer once more.
AGAIN = "again"


class Net(nn.Module):
    """Layers one after the other between an embedding or a linear layer and a head."""

    def __init__(
        self, kinds: tuple[str, ...], width: int, classes: int, *, reads_tokens: bool, tied: bool
    ) -> None:
        super().__init__()
        self.first: nn.Module = (
            nn.Embedding(classes, width) if reads_tokens else nn.Linear(6, width)
        )
        self.kinds = kinds
        known = {**LAYERS, **LAYOUTS, **RUNS}
        made = [nn.Identity() if kind == AGAIN else known[kind](width) for kind in kinds]
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(width, classes)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = self.layers[0](x) if kind == AGAIN else layer(x)
        return self.head(x)  # type: ignore[no-any-return]
