"""Width search: on how many devices each layer of a chain runs, so that the step takes least.

In: a `WidthProblem`, in which the samples of a step are a fixed number. Out: a `WidthPlan`
(DeepPool; Park et al., MLSys 2022), by a dynamic program over the widths of all layers:

    t[i, g]        = min over p of t[i-1, p] + transfer(p, g) + compute(i, batch/g) + sync(i, g)
    sync(i, g)     = gradient bytes / rate, 0 for one device
    transfer(p, g) = 2 (max(sent, received by any device) / rate + latency), 0 for p = g

What a device has under both widths is not sent. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cotrain_compile.cluster.model.profiles import BATCH, Layer, LayerProfile
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Network

# Ops that work on each number by itself, by how their names begin.
POINTWISE = ("relu", "gelu", "silu", "tanh", "sigmoid", "dropout", "identity", "flatten")


@dataclass(frozen=True)
class WidthProblem:
    """`batch` samples a step, on up to `devices` devices joined by `network`.

    Raises `OptionError` for a model with branches, which no rank could run by widths.
    """

    profile: LayerProfile
    network: Network
    batch: int
    devices: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.devices < 1:
            raise OptionError(
                f"a step has samples and devices, not {self.batch} and {self.devices}"
            )
        if not self.profile.is_chain:
            raise OptionError(
                f"{self.profile.name} has branches, and widths are of a chain; join the layers of "
                "a branch to one"
            )

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Powers of two that are no more than the devices and share the batch evenly."""
        powers = (1 << i for i in range(self.devices.bit_length()))
        return tuple(w for w in powers if w <= self.devices and self.batch % w == 0)

    def layer_s(self, layer: Layer, width: int) -> float:
        """Forward, backward and sum of gradients of a layer on so many devices."""
        return layer.compute_s(self.batch / width) + self.sync_s(layer, width)

    def sync_s(self, layer: Layer, width: int) -> float:
        """The sum of a layer's gradients over its devices."""
        return layer.grad_bytes / self.network.bytes_per_s if width > 1 else 0.0

    def transfer_s(self, layer: Layer, before: int, after: int) -> float:
        """What a layer reads, forward and backward, from one width to another.

        Nothing of the batch: each device reads its own samples.
        """
        (read,) = layer.reads
        if before == after or read.source == BATCH:
            return 0.0
        nbytes, apart = read.nbytes.at(self.batch), 1 / min(before, after) - 1 / max(before, after)
        most = max(apart, 1 / max(before, after))
        return 2 * (most * nbytes / self.network.bytes_per_s + self.network.latency_s)


@dataclass(frozen=True)
class WidthPlan:
    """The width of each layer by name, and the step's time."""

    widths: Mapping[str, int]
    step_s: float


class _Path(NamedTuple):
    """A way to run the layers up to one of them."""

    seconds: float
    device_s: float
    widths: tuple[int, ...]


def _cost(path: _Path) -> tuple[float, float]:
    """What is to be least: seconds, and among equals device-seconds."""
    return path.seconds, path.device_s


def plan_widths(problem: WidthProblem) -> WidthPlan:
    """The widths with the least step time; among equals few device-seconds."""
    ends = {0: _Path(0.0, 0.0, ())}
    layers = problem.profile.layers
    for layer in layers:
        ends = {
            width: min(paths, key=_cost)
            for width in problem.widths
            if (
                paths := [
                    _then(problem, path, layer, before, width)
                    for before, path in ends.items()
                    if before == width or not is_pinned(layer)
                ]
            )
        }
    best = min(ends.values(), key=_cost)
    names = (layer.name for layer in layers)
    return WidthPlan(dict(zip(names, best.widths, strict=True)), best.seconds)


def is_pinned(layer: Layer) -> bool:
    """Whether it must have the width of the layer that it reads."""
    (read,) = layer.reads
    return read.source != BATCH and layer.op.lower().startswith(POINTWISE)


def _then(problem: WidthProblem, path: _Path, layer: Layer, before: int, width: int) -> _Path:
    moved_s = problem.transfer_s(layer, before, width)
    layer_s = problem.layer_s(layer, width)
    return _Path(
        path.seconds + moved_s + layer_s,
        path.device_s + moved_s * max(before, width) + layer_s * width,
        (*path.widths, width),
    )
