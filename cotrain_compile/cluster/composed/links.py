"""Links of a mesh: what each rank exchanges over with the others of a dimension.

In: a cluster whose devices are the ranks of a `Layout`, in its order. Out: a `Way` for each
dimension, and from one stage to the next. All groups of a dimension exchange at the same time, each
in a ring, so that those that leave a machine share its network card; the slowest of all is what
each of them has. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

from cotrain_compile.cluster.model.description import Cluster, DevicePlace
from cotrain_compile.cluster.model.layout import DIMENSIONS, Layout
from cotrain_compile.cluster.model.machines import rank_machine, slower_of
from cotrain_compile.cluster.steps.stage_step import Ring
from cotrain_compile.machine import NETWORK, Machine, Network

# Rings within machines exchange beside those that leave them.
_WITHIN = f"{NETWORK} in machines"

_Edge = tuple[DevicePlace, DevicePlace]
_Machine = tuple[int, int]


class Way(NamedTuple):
    """What a rank sends over to the next, and which part of what all send leaves its machine."""

    network: Network
    leaving: float

    def ring(self, ranks: int) -> Ring:
        """So many ranks that exchange over it."""
        return Ring(self.network, ranks, lane=NETWORK if self.leaving else _WITHIN)


class MeshLinks:
    """The ways on a cluster, each worked out once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._rings: dict[tuple[int, int], Way] = {}
        self._hops: dict[int, list[Way]] = {}
        self._slowest: dict[tuple[tuple[int, int], ...], tuple[Machine, Sequence[str]]] = {}

    def ways(self, layout: Layout) -> dict[str, Way]:
        """By dimension; `data` is for all ranks of `replicate` and of `experts`, which sum what is
        no expert: the slower of both."""
        sizes, stride = layout.sizes, 1
        found: dict[str, Way] = {}
        for name in reversed(DIMENSIONS):
            if sizes[name] > 1 and name != "pipeline":
                found[name] = self._ring(sizes[name], stride)
            stride *= sizes[name]
        around = [found[name] for name in ("replicate", "experts") if name in found]
        if around:
            found["data"] = min(around, key=lambda way: way.network.bytes_per_s)
        return found

    def hops(self, layout: Layout) -> list[Way]:
        """From each stage to the next, all ranks of a stage at once."""
        stride = layout.devices // layout.pipeline
        if stride not in self._hops:
            places = self.cluster.devices
            pairs = list(zip(places, places[stride:], strict=False))
            stages = range(0, len(pairs), stride)
            self._hops[stride] = [_way(self.cluster, pairs[i : i + stride]) for i in stages]
        return self._hops[stride]

    def slowest(self, first: int, count: int) -> tuple[Machine, Sequence[str]]:
        """What each of so many ranks has at least, and of which kinds they are."""
        found: dict[tuple[int, int], None] = {}
        for place in self.cluster.devices[first : first + count]:
            found[place.group, place.device] = None
        key = tuple(sorted(found))
        if key not in self._slowest:
            machines = [rank_machine(self.cluster.groups[g], device) for g, device in key]
            kinds = [self.cluster.groups[g].kinds[device] for g, device in key]
            self._slowest[key] = reduce(slower_of, machines), sorted(set(kinds))
        return self._slowest[key]

    def _ring(self, size: int, stride: int) -> Way:
        """Rings of so many ranks, each so many behind the one before, that all devices are in."""
        if (size, stride) not in self._rings:
            edges = list(_edges(self.cluster.devices, size, stride))
            self._rings[size, stride] = _way(self.cluster, edges)
        return self._rings[size, stride]


def _way(cluster: Cluster, edges: Sequence[_Edge]) -> Way:
    crossing = [(_machine(a), _machine(b)) for a, b in edges if _machine(a) != _machine(b)]
    leaving = Counter(a for a, _ in crossing)
    coming = Counter(b for _, b in crossing)
    within = {_machine(a) for a, b in edges if _machine(a) == _machine(b)}
    networks = [*_cards(cluster, leaving), *_cards(cluster, coming)]
    networks += [peers for group, _ in within if (peers := cluster.groups[group].peers)]
    slowest = Network(
        min(network.bytes_per_s for network in networks),
        max(network.latency_s for network in networks),
    )
    return Way(slowest, len(crossing) / len(edges))


def _cards(cluster: Cluster, sharing: Counter[_Machine]) -> Iterator[Network]:
    """What is left of network cards of which so many ranks share each."""
    for (group, _), count in sharing.items():
        nic = cluster.groups[group].nic
        assert nic is not None  # a cluster of several machines has it
        yield Network(nic.bytes_per_s / count, nic.latency_s)


def _machine(place: DevicePlace) -> _Machine:
    return place.group, place.machine


def _edges(places: Sequence[DevicePlace], size: int, stride: int) -> Iterator[_Edge]:
    """From each rank to the next of its ring."""
    for block in range(0, len(places), size * stride):
        for first in range(block, block + stride):
            ring = [places[first + stride * i] for i in range(size)]
            yield from zip(ring, ring[1:] + ring[:1], strict=True)
