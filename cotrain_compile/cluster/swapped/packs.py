"""Packs: consecutive layers that Harmony brings to a device together, and what a pack costs.

In: a `LayerProfile` that is a chain, and what a device may hold. Out: `PackCosts` (seconds, bytes
and peaks of any pack at any micro-batch size), and the packings that Harmony tries: filled from
the back, memory balanced, time balanced (Harmony, VLDB 2022, section 4.3).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.support.units import format_bytes


@dataclass(frozen=True, order=True)
class Pack:
    """The layers `first` to before `last`."""

    first: int
    last: int


Packs = tuple[Pack, ...]
"""A packing: packs one behind the other, from the first layer on."""


@dataclass(frozen=True)
class _Table:
    """Of all layers at one micro-batch size: sums over the layers before each, and what enters."""

    forward_s: list[float]
    backward_s: list[float]
    forward_bytes: list[float]
    backward_bytes: list[float]
    input_bytes: list[float]


class PackCosts:
    """What packs of a profile cost; `samples` is always the size of one micro-batch.

    Raises:
        OptionError: the layers are no chain, or their peaks were not measured.
    """

    def __init__(self, profile: LayerProfile) -> None:
        if not profile.is_chain:
            raise OptionError(
                f"{profile.name} has branches, and packs are stretches of a chain; join the layers "
                "of a branch to one"
            )
        self.layers = profile.layers
        self._weights = _before([layer.param_bytes + layer.buffer_bytes for layer in self.layers])
        self._update_s = _before([layer.host_update_s for layer in self.layers])
        self._at = cache(self._table)

    def _table(self, samples: int) -> _Table:
        inputs = [layer.input_bytes(samples) for layer in self.layers]
        return _Table(
            _before([layer.forward_s.at(samples) for layer in self.layers]),
            _before([layer.backward_s.at(samples) for layer in self.layers]),
            _before([layer.forward_peak(samples) for layer in self.layers]),
            _before([layer.backward_peak(samples) for layer in self.layers]),
            [*inputs, 0.0],
        )

    def forward_s(self, samples: int, pack: Pack) -> float:
        """Seconds of the forward, and of the forward that runs again before a backward."""
        return _over(self._at(samples).forward_s, pack)

    def backward_s(self, samples: int, pack: Pack) -> float:
        """Seconds of the backward, without the forward that runs again."""
        return _over(self._at(samples).backward_s, pack)

    def update_s(self, pack: Pack) -> float:
        """Seconds of the update on the host."""
        return _over(self._update_s, pack)

    def weight_bytes(self, pack: Pack) -> float:
        """Parameters and buffers; as many bytes of gradients and buffers go back."""
        return _over(self._weights, pack)

    def input_bytes(self, samples: int, layer: int) -> float:
        """What enters a layer, as does its gradient the layer before; 0 behind the last layer."""
        return self._at(samples).input_bytes[layer]

    def forward_peak_bytes(self, samples: int, pack: Pack) -> float:
        """Peaks of the layers, and what enters the first; what is between them they make."""
        table = self._at(samples)
        return _over(table.forward_bytes, pack) + table.input_bytes[pack.first]

    def backward_peak_bytes(self, samples: int, pack: Pack) -> float:
        """The same for the backward."""
        table = self._at(samples)
        return _over(table.backward_bytes, pack) + table.input_bytes[pack.first]

    def forward_task_bytes(self, samples: int, pack: Pack, stashed: Sequence[int]) -> float:
        """What a forward task holds: the pack, its input and output, the inputs sent to the host.

        `stashed` are the layers of the pack at which packs of the backward begin.
        """
        ends = self.input_bytes(samples, pack.first) + self.input_bytes(samples, pack.last)
        kept = sum(self.input_bytes(samples, layer) for layer in stashed)
        return self.forward_peak_bytes(samples, pack) + ends + kept

    def backward_task_bytes(self, samples: int, pack: Pack) -> float:
        """What a backward task holds: the pack, its input twice, both gradients."""
        entering = self.input_bytes(samples, pack.first)
        leaving = self.input_bytes(samples, pack.last)
        own = self.backward_peak_bytes(samples, pack)
        return own + (3 if pack.first else 2) * entering + leaving


def _before(figures: Sequence[float]) -> list[float]:
    return list(accumulate(figures, initial=0.0))


def _over(before: Sequence[float], pack: Pack) -> float:
    return before[pack.last] - before[pack.first]


Fits = Callable[[Pack], bool]


def filled_from_the_back(layers: int, fits: Fits) -> Packs | None:
    """The last pack as large as fits, then the one before it; what is left over is the first one.

    None where a layer alone does not fit, here and below.
    """
    packs: list[Pack] = []
    last = layers
    while last:
        first = last - 1
        if not fits(Pack(first, last)):
            return None
        while first and fits(Pack(first - 1, last)):
            first -= 1
        packs.append(Pack(first, last))
        last = first
    return tuple(reversed(packs))


def balanced(weights: Sequence[float], fits: Fits, at_least: int) -> Packs | None:
    """The fewest packs, from `at_least` on, that fit if cut at equal shares of a sum."""
    for count in range(max(1, at_least), len(weights) + 1):
        packs = cut_at_shares(weights, count)
        if packs is not None and all(map(fits, packs)):
            return packs
    return None


def cut_at_shares(weights: Sequence[float], count: int) -> Packs | None:
    """So many packs, cut at equal shares of the sum; None where one would have no layer.

    The k-th of S packs ends before the layer with which the sum of `weights` exceeds k S-ths.
    """
    sums = list(accumulate(weights))
    inner = [bisect_right(sums, k * sums[-1] / count) for k in range(1, count)]
    bounds = [0, *inner, len(weights)]
    if any(a >= b for a, b in pairwise(bounds)):
        return None
    return tuple(Pack(a, b) for a, b in pairwise(bounds))


def packings(
    costs: PackCosts, samples: int, layers: int, fits: Fits, cap_bytes: float, *, backward: bool
) -> list[Packs]:
    """The packings of the first `layers` layers that Harmony tries, where they fit: filled from the
    back, balanced by memory, balanced by time.

    Their sums are over what each layer takes beside its input.
    """
    peak = costs.backward_peak_bytes if backward else costs.forward_peak_bytes
    alone = [Pack(layer, layer + 1) for layer in range(layers)]
    own = [peak(samples, pack) - costs.input_bytes(samples, pack.first) for pack in alone]
    seconds = [
        costs.forward_s(samples, pack) + (costs.backward_s(samples, pack) if backward else 0.0)
        for pack in alone
    ]
    least = math.ceil(sum(own) / cap_bytes)
    tried = [
        filled_from_the_back(layers, fits),
        balanced(own, fits, least),
        balanced(seconds, fits, least),
    ]
    return [packs for packs in tried if packs is not None]


def require_packing(packs: Packs, layers: int) -> None:
    """Raise `OptionError` unless these are packs one behind the other, of so many layers."""
    bounds = [0, *(pack.last for pack in packs)]
    if bounds[-1] != layers or [(p.first, p.last) for p in packs] != list(pairwise(bounds)):
        told = ", ".join(f"{pack.first} to {pack.last}" for pack in packs) or "none"
        raise OptionError(
            f"packs are stretches of layers one behind the other, from 0 to {layers}, not {told}"
        )


def packs_too_large(nbytes: float, capacity: int) -> PlacementError:
    """The error for packs that were given and take so many bytes, one sample at a time."""
    missing = max(1, round(nbytes - capacity))
    return PlacementError(
        f"these packs need {format_bytes(missing)} more on a device, one sample at a time; take "
        "smaller packs, or leave packs out",
        shortfall_bytes=missing,
    )
