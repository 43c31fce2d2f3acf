"""Units: the layers of a profile, joined to what ranks exchange, fetch and update at once.

In: a `LayerProfile`, as it is or with layers that run again for the backward. Out: its `Unit`s, and
whether anybody knows what it takes of a device's memory. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from cotrain_compile.cluster.model.profiles import BySamples, Layer, LayerProfile

# What is exchanged at once at least, as DistributedDataParallel has it.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Unit:
    """Consecutive layers whose parameters are gathered, and gradients summed, at once."""

    name: str
    layers: tuple[Layer, ...]

    @cached_property
    def param_bytes(self) -> int:
        return sum(layer.param_bytes for layer in self.layers)

    @cached_property
    def grad_bytes(self) -> int:
        return sum(layer.grad_bytes for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def resting_bytes(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.param_bytes + self.grad_bytes + self.state_bytes

    @property
    def touched_bytes(self) -> int:
        """What an update reads and writes."""
        return sum(layer.touched_bytes for layer in self.layers)

    def forward_s(self, samples: int) -> float:
        return sum(layer.forward_s.at(samples) for layer in self.layers)

    def backward_s(self, samples: int) -> float:
        return sum(layer.backward_s.at(samples) for layer in self.layers)

    def kept_bytes(self, samples: int) -> float:
        """From forward to backward, or `OptionError` where nobody knows it."""
        return sum(layer.kept(samples) for layer in self.layers)


def units_of(profile: LayerProfile) -> tuple[Unit, ...]:
    """The layers in units of `BUCKET_BYTES` or more, from the back as gradients come."""
    units: list[Unit] = []
    held: list[Layer] = []
    for layer in reversed(profile.layers):
        held.insert(0, layer)
        if sum(each.param_bytes for each in held) >= BUCKET_BYTES:
            units.insert(0, Unit(held[0].name, tuple(held)))
            held = []
    if held:
        units.insert(0, Unit(held[0].name, tuple(held)))
    return tuple(units)


def knows_peaks(profile: LayerProfile) -> bool:
    """Whether a peak can be told: of each layer that of the backward, and what it keeps."""
    return all(layer.backward_peak_bytes and layer.kept_bytes for layer in profile.layers)


def ways_of(profile: LayerProfile) -> list[tuple[LayerProfile, bool]]:
    """As it is, and with every layer run again; those of which peaks are known, if there are any.

    What layers that run again keep is their input, which every profile knows.
    """
    ways = [(profile, False), (running_again(profile), True)]
    return [way for way in ways if knows_peaks(way[0])] or ways[:1]


def running_again(profile: LayerProfile) -> LayerProfile:
    """Every layer keeps its input alone, and runs again before its backward.

    A peak is without what the layer reads, so that the input is counted beside it.
    """
    return replace(profile, layers=tuple(_running_again(layer) for layer in profile.layers))


def _running_again(layer: Layer) -> Layer:
    entering = layer.reads[0].nbytes
    for read in layer.reads[1:]:
        entering = _sum(entering, read.nbytes)
    peak = layer.backward_peak_bytes
    return replace(
        layer,
        backward_s=_sum(layer.backward_s, layer.forward_s),
        kept_bytes=entering,
        backward_peak_bytes=_sum(peak, entering) if peak else None,
    )


def _sum(one: BySamples, other: BySamples) -> BySamples:
    """Both together, at all numbers of samples at which either is known."""
    known = tuple(sorted({*one.samples, *other.samples}))
    return BySamples(known, tuple(one.at(n) + other.at(n) for n in known))
