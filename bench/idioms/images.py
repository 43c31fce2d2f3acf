"""Idioms of models of images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.models import Wrap, images
from bench.idioms.registry import model_idiom


@model_idiom(images)
def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    )


@model_idiom(images)
def convolutions_with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 4),
    )


@model_idiom(images)
def depthwise_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 3, 3, groups=3),
        nn.Conv2d(3, 4, 1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 4),
    )


@model_idiom(images)
def strided_and_dilated_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 2, dilation=2), nn.Flatten(), nn.Linear(4, 4)
    )


@model_idiom(images)
def transposed_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 4, stride=2),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


@model_idiom(images)
def pooling_of_all_kinds() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.LPPool2d(2, 2), nn.Flatten(), nn.Linear(4, 4)
    )


@model_idiom(images)
def channels_last_images() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.body(x.to(memory_format=torch.channels_last)).mean((2, 3)))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 4)).to(
        memory_format=torch.channels_last
    )


@model_idiom(images)
def upsampling() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(144, 4)
    )


@model_idiom(images)
def bilinear_interpolation() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(F.interpolate(m.body(x), size=4, mode="bilinear").flatten(1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv2d(3, 4, 3), head=nn.Linear(64, 4))


@model_idiom(images)
def skip_connections_of_a_u_net() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = F.silu(m.down(x))
        b = F.silu(m.deep(F.avg_pool2d(a, 2)))
        return m.head(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)).mean((2, 3))  # type: ignore[no-any-return]

    return Wrap(
        forward,
        down=nn.Conv2d(3, 4, 3, padding=1),
        deep=nn.Conv2d(4, 4, 3, padding=1),
        head=nn.Conv2d(8, 4, 1),
    )


@model_idiom(images)
def patches_of_images() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(F.unfold(x, 4, stride=4).transpose(1, 2)).mean(1)  # type: ignore[no-any-return]

    return Wrap(forward, head=nn.Linear(48, 4))


@model_idiom(images)
def pixel_shuffle() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(144, 4))


@model_idiom(images)
def squeeze_and_excitation() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.body(x)
        return m.head((a * m.gate(a.mean((2, 3))).sigmoid()[:, :, None, None]).mean((2, 3)))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv2d(3, 4, 3), gate=nn.Linear(4, 4), head=nn.Linear(4, 4))


@model_idiom(images)
def grid_sampling() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        theta = m.locate(x.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, [len(x), 3, 4, 4], align_corners=False)
        return m.head(F.grid_sample(x, grid, align_corners=False).flatten(1))  # type: ignore[no-any-return]

    return Wrap(forward, locate=nn.Linear(3, 6), head=nn.Linear(48, 4))
