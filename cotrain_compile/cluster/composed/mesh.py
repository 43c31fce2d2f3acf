"""Mesh: every way to run a model on the ranks of one layout, each with what it takes at least.

In: a profile, sizes of a mesh's dimensions, the devices that are its ranks. Out: `MeshOption`s:
sizes of micro-batches, what is gathered again, what is made again. An option's bound comes before
its plans are made, which are cut, placed in memory and simulated by what runs one rank: replicas or
shards (`data_parallel`), or a stage of a pipeline (`pipeline`), on the profile of a rank.

No torch.

Links of a mesh: what each rank exchanges over with the others of a dimension.

In: a cluster whose devices are the ranks of a `Layout`, in its order. Out: a `MeshLink` for each
dimension, and from one stage to the next. All groups of a dimension exchange at the same time, each
in a ring, so that those that leave a machine share its network card; the slowest of all is what
each of them has. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from typing import NamedTuple

from cotrain_compile.cluster.composed.divided import Divided, rank_profile
from cotrain_compile.cluster.data_parallel.data_parallel import (
    SHARD,
    DataParallelPlan,
    LayersAs,
    ranks_of,
    sizes_of,
)
from cotrain_compile.cluster.data_parallel.step import Replicas, Sharding
from cotrain_compile.cluster.model.description import Cluster, DevicePlace
from cotrain_compile.cluster.model.layout import DIMENSIONS, Layout
from cotrain_compile.cluster.model.machines import rank_machine, slower_of
from cotrain_compile.cluster.model.profiles import LayerProfile, ways_of
from cotrain_compile.cluster.pipeline.bounds import PassSeconds, least_of, once_s
from cotrain_compile.cluster.pipeline.cuts import PipelineDevices, PipelineOrder
from cotrain_compile.cluster.pipeline.pipeline import (
    Batches,
    PipelinePlan,
    plans_at,
)
from cotrain_compile.cluster.pipeline.shared_stages import SharedStages
from cotrain_compile.cluster.steps.stage_step import Ring
from cotrain_compile.machine import NETWORK, Machine, Network

# GPipe takes as long, and keeps more.
ORDER = PipelineOrder.ONE_F_ONE_B


class RankLayers:
    """The layers of a rank by how they are divided, each worked out once."""

    def __init__(self, profile: LayerProfile) -> None:
        self.whole = profile
        self._found: dict[Divided, tuple[LayerProfile, Sequence[LayersAs]]] = {}
        self._seconds: dict[tuple[Divided, int], PassSeconds] = {}

    def profile(self, divided: Divided) -> LayerProfile:
        return self._of(divided)[0]

    def ways(self, divided: Divided) -> Sequence[LayersAs]:
        """As they are, and run again."""
        return self._of(divided)[1]

    def again_s(self, divided: Divided, samples: int) -> PassSeconds:
        """Of a micro-batch whose layers run again."""
        if (divided, samples) not in self._seconds:
            self._seconds[divided, samples] = once_s(self.profile(divided), samples).again
        return self._seconds[divided, samples]

    def _of(self, divided: Divided) -> tuple[LayerProfile, Sequence[LayersAs]]:
        if divided not in self._found:
            profile = rank_profile(self.whole, divided)
            ways = [LayersAs(way, again) for way, again in ways_of(profile)]
            self._found[divided] = profile, ways
        return self._found[divided]


@dataclass(frozen=True)
class MeshOption:
    """One way to run the ranks of a mesh, and what no plan of it passes under."""

    mesh: Mesh
    layout: Layout
    least_s: float
    choice: DataParallelPlan | Batches

    def plans(self) -> Iterator[DataParallelPlan | PipelinePlan]:
        """All that fit, with as little on hosts as fits."""
        if isinstance(self.choice, DataParallelPlan):
            yield from self.choice.plans()
            return
        mesh = self.mesh
        for plan in plans_at(mesh.profile, mesh.stages, ORDER, self.choice, mesh.beside):
            if len(plan.cut.split_points) == self.layout.pipeline - 1:
                yield plan


@dataclass(frozen=True)
class Mesh:
    """The sizes of `layout`, on all devices of `links`, for so many samples a step."""

    layout: Layout
    links: MeshLinks
    layers: RankLayers
    samples: int

    @property
    def share(self) -> int:
        """The samples of a rank."""
        return self.samples // self.layout.replicas

    @cached_property
    def ways(self) -> Mapping[str, MeshLink]:
        return self.links.ways(self.layout)

    @cached_property
    def divided(self) -> Divided:
        layout, ways = self.layout, self.ways
        return Divided(
            layout.tensor,
            layout.experts,
            layout.sequence,
            ways["tensor"].network if "tensor" in ways else None,
            ways["experts"].network if "experts" in ways else None,
        )

    @property
    def profile(self) -> LayerProfile:
        """Of a rank, with the layers of all stages."""
        return self.layers.profile(self.divided)

    @cached_property
    def rings(self) -> Mapping[str, Ring]:
        """Those over which parameters and gradients are exchanged."""
        layout = self.layout
        sizes = {"shard": layout.shard, "data": layout.replicate * layout.experts}
        if layout.experts > 1:
            sizes["replicate"] = layout.replicate
        return {name: self.ways[name].ring(n) for name, n in sizes.items() if n > 1}

    @property
    def beside(self) -> SharedStages:
        """What the ranks of a stage exchange."""
        return SharedStages(self.rings, self.layout.experts > 1)

    def options(self) -> Iterator[MeshOption]:
        """All of them."""
        yield from self._in_stages() if self.layout.pipeline > 1 else self._alone()

    def _alone(self) -> Iterator[MeshOption]:
        layout, rings = self.layout, dict(self.rings)
        first = rings.pop("shard" if layout.shard > 1 else "data", None)
        cluster = self.links.cluster
        ranks = tuple(ranks_of(cluster, self.layers.whole))
        ways = self.layers.ways(self.divided)
        shardings = SHARD if layout.shard > 1 else (Sharding.REPLICATE,)
        for each, sharding, layers in product(sizes_of(ways, self.share), shardings, ways):
            replicas = Replicas(
                layers.units,
                each,
                self.share // each,
                ranks,
                first,
                sharding,
                rings=rings,
                experts=layout.experts > 1,
            )
            choice = DataParallelPlan(layers, cluster, replicas)
            found = replace(
                layout,
                gathered_again=sharding is Sharding.AGAIN,
                recompute=layers.recompute,
                micro_batches=replicas.micro_batches,
                micro_batch=each,
            )
            yield MeshOption(self, found, choice.passes_s, choice)

    def _in_stages(self) -> Iterator[MeshOption]:
        stages = self.layout.pipeline
        fastest = min(rank.slowness for rank in self.stages.ranks(self.layers.whole))
        for each in range(1, self.share + 1):
            if self.share % each:
                continue
            count = self.share // each
            least_s = least_of(self.layers.again_s(self.divided, each), count, stages)
            found = replace(
                self.layout,
                gathered_again=False,
                recompute=True,
                micro_batches=count,
                micro_batch=each,
            )
            yield MeshOption(self, found, fastest * least_s, Batches(each, count, recompute=True))

    @cached_property
    def stages(self) -> PipelineDevices:
        """What a rank of each stage has at least, of the slowest kind among them."""
        links, size = self.links, self.layout.devices // self.layout.pipeline
        networks = [*(way.network for way in links.hops(self.layout)), None]
        machines, kinds = [], []
        for stage, network in enumerate(networks):
            machine, own = links.slowest(stage * size, size)
            machines.append(machine.but(network=network))
            kinds.append(max(own, key=lambda kind: self.layers.whole.times_slower([kind])))
        hosts = tuple((0, stage) for stage in range(len(machines)))
        return PipelineDevices(tuple(machines), tuple(kinds), hosts)


# Rings within machines exchange beside those that leave them.
_WITHIN = f"{NETWORK} in machines"

_Edge = tuple[DevicePlace, DevicePlace]
_Machine = tuple[int, int]


class MeshLink(NamedTuple):
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
        self._rings: dict[tuple[int, int], MeshLink] = {}
        self._hops: dict[int, list[MeshLink]] = {}
        self._slowest: dict[tuple[tuple[int, int], ...], tuple[Machine, Sequence[str]]] = {}

    def ways(self, layout: Layout) -> dict[str, MeshLink]:
        """By dimension; `data` is for all ranks of `replicate` and of `experts`, which sum what is
        no expert: the slower of both."""
        sizes, stride = layout.sizes, 1
        found: dict[str, MeshLink] = {}
        for name in reversed(DIMENSIONS):
            if sizes[name] > 1 and name != "pipeline":
                found[name] = self._ring(sizes[name], stride)
            stride *= sizes[name]
        around = [found[name] for name in ("replicate", "experts") if name in found]
        if around:
            found["data"] = min(around, key=lambda way: way.network.bytes_per_s)
        return found

    def hops(self, layout: Layout) -> list[MeshLink]:
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

    def _ring(self, size: int, stride: int) -> MeshLink:
        """Rings of so many ranks, each so many behind the one before, that all devices are in."""
        if (size, stride) not in self._rings:
            edges = list(_edges(self.cluster.devices, size, stride))
            self._rings[size, stride] = _way(self.cluster, edges)
        return self._rings[size, stride]


def _way(cluster: Cluster, edges: Sequence[_Edge]) -> MeshLink:
    crossing = [(_machine(a), _machine(b)) for a, b in edges if _machine(a) != _machine(b)]
    leaving = Counter(a for a, _ in crossing)
    coming = Counter(b for _, b in crossing)
    within = {_machine(a) for a, b in edges if _machine(a) == _machine(b)}
    networks = [*_cards(cluster, leaving), *_cards(cluster, coming)]
    networks += [peers for group, _ in within if (peers := cluster.groups[group].peers)]
    slowest = Network(
        min(network.bytes_per_s for network in networks),
        max(network.latency_s for network in networks),
        max(network.scatter for network in networks),
    )
    return MeshLink(slowest, len(crossing) / len(edges))


def _cards(cluster: Cluster, sharing: Counter[_Machine]) -> Iterator[Network]:
    """What is left of network cards of which so many ranks share each."""
    for (group, _), count in sharing.items():
        nic = cluster.groups[group].nic
        assert nic is not None  # a cluster of several machines has it
        yield replace(nic, bytes_per_s=nic.bytes_per_s / count)


def _machine(place: DevicePlace) -> _Machine:
    return place.group, place.machine


def _edges(places: Sequence[DevicePlace], size: int, stride: int) -> Iterator[_Edge]:
    """From each rank to the next of its ring."""
    for block in range(0, len(places), size * stride):
        for first in range(block, block + stride):
            ring = [places[first + stride * i] for i in range(size)]
            yield from zip(ring, ring[1:] + ring[:1], strict=True)
