"""Layers for random models whose values lie oddly in memory, are tiny, or write buffers by views.

In: a width. Out: a module that maps (rows, width) to (rows, width), as those of `fuzz_layers`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARTS = 2


class Function(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class NormedRows(nn.Module):
    """A norm over transposed rows, as of the channels of a sequence, between linear layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(PARTS, PARTS), nn.Linear(PARTS, PARTS)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.view(len(x), -1, PARTS)).mT
        return x + self.last(self.norm(y).mT).reshape(x.shape)  # type: ignore[no-any-return]


class ChannelsLast(nn.Module):
    """Images of one row in channels last, through a convolution and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(len(x), 2, 2, -1).contiguous(memory_format=torch.channels_last)
        return x + self.norm(self.conv(image)).reshape(x.shape)  # type: ignore[no-any-return]


class Tiny(nn.Module):
    """A parameter whose gradients are a millionth of those of others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * self.linear(x)  # type: ignore[no-any-return]


class Written(nn.Module):
    """A buffer whose columns and elements the forward writes, one after the other."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.table[:, 0].copy_(x.mean(0))
            self.table[:, 1].mul_(0.9).add_(x.std(0, correction=0), alpha=0.1)
            self.table[::2, 2] += 1
        return x - 0.1 * self.table[:, 1]


def _each_activation(x: Tensor) -> Tensor:
    t = x.view(len(x), -1, 2).mT
    y = F.hardswish(t) + F.elu(t) + F.softplus(t) + F.logsigmoid(t) + F.hardtanh(t)
    return x + 0.1 * y.mT.reshape(x.shape)


def _permuted(x: Tensor) -> Tensor:
    y = x.view(len(x), 2, 2, -1).permute(3, 0, 2, 1)
    return x + (y * y.sigmoid()).permute(1, 3, 2, 0).reshape(x.shape)


def _strided(x: Tensor) -> Tensor:
    row = x.contiguous()
    every_other = row.as_strided((len(x), x.shape[1] // 2), (x.shape[1], 2), 1)
    return x + torch.cat([every_other.tanh(), x[:, ::2] * 0.5], dim=1)


def _windows(x: Tensor) -> Tensor:
    return F.pad(x.unfold(1, 2, 1).mean(-1), (0, 1)) + x


def _expanded(x: Tensor) -> Tensor:
    many = x.unsqueeze(1).expand(len(x), 3, x.shape[1])
    return x + (many.softmax(1) * many).sum(1)


LAYOUTS: dict[str, Callable[[int], nn.Module]] = {
    "batch norm of rows": lambda width: NormedRows(nn.BatchNorm1d(PARTS)),
    "layer norm of rows": lambda width: NormedRows(nn.LayerNorm(width // PARTS)),
    "group norm of rows": lambda width: NormedRows(nn.GroupNorm(2, PARTS)),
    "instance norm of rows": lambda width: NormedRows(nn.InstanceNorm1d(PARTS, affine=True)),
    "channels last": ChannelsLast,
    "tiny": Tiny,
    "written": Written,
    "activations of rows": lambda width: Function(_each_activation),
    "permuted": lambda width: Function(_permuted),
    "every other": lambda width: Function(_strided),
    "windows": lambda width: Function(_windows),
    "expanded": lambda width: Function(_expanded),
    "log softmax of columns": lambda width: Function(lambda x: x + x.t().log_softmax(-1).t()),
    "masked": lambda width: Function(lambda x: x.masked_fill(x.detach().abs() > 2, 0.5)),
    "rounded": lambda width: Function(
        lambda x: x + torch.div(x.t(), 4e3, rounding_mode="floor").t()
    ),
}
