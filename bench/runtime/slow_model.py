"""A slow model: equal residual layers that take a time, so that other work counts little.

A layer with `ROWS` samples takes `FORWARD_S` forward and `BACKWARD_S` backward, for which whoever
runs it sleeps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cotrain_compile.cluster.model.profiles import (
    BATCH,
    Layer,
    LayerProfile,
    Read,
    constant,
    per_sample,
)
from cotrain_compile.runtime.network import sleep_until

LAYERS, WIDTH, ROWS = 8, 256, 64
FORWARD_S, BACKWARD_S = 0.03, 0.06
ROW_BYTES = 4 * WIDTH
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Residual(nn.Module):
    """A layer with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.inner(x))


class Model(nn.Module):
    """Equal layers, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def slowed(run: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """`run`, which takes so long."""

    @functools.wraps(run)  # so that `inspect` finds what is behind it
    def slow(*args: Any) -> Any:
        ends_s = time.perf_counter() + seconds
        result = run(*args)
        sleep_until(ends_s)
        return result

    return slow


class _Slow(torch.autograd.Function):
    """Takes what a layer takes with the rows at hand, in either direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sleep_until(time.perf_counter() + FORWARD_S * len(x) / ROWS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        sleep_until(time.perf_counter() + BACKWARD_S * len(gradient) / ROWS)
        return gradient


def slow_in_eager(model: Model) -> Model:
    """`model`, whose layers take their time where autograd runs them."""
    slow: Any = _Slow  # torch gives `apply` no types
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: slow.apply(output))
    return model


def profile(layers: int = 1) -> LayerProfile:
    """The model with so many layers as one, and what these take."""
    nbytes = layers * LAYER_BYTES
    enters = partial(Read, nbytes=per_sample(ROW_BYTES))
    names = [f"layers.{first}" for first in range(0, LAYERS, layers)]
    found = [
        Layer(
            name=name,
            op="layer",
            reads=(enters(before),),
            forward_s=per_sample(layers * FORWARD_S / ROWS),
            backward_s=per_sample(layers * BACKWARD_S / ROWS),
            param_bytes=nbytes,
            grad_bytes=nbytes,
            forward_peak_bytes=constant(nbytes),
            backward_peak_bytes=constant(2 * nbytes),
        )
        for before, name in zip((BATCH, *names), names, strict=False)
    ]
    return LayerProfile("slow layers", tuple(found))
