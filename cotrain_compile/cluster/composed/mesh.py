"""Mesh: every way to run a model on the ranks of one layout, each with what it takes at least.

In: a profile, sizes of a mesh's dimensions, the devices that are its ranks. Out: `Option`s: sizes
of micro-batches, what is gathered again, what is made again. An option's bound comes before its
plans are made, which are cut, placed in memory and simulated by what runs one rank: replicas or
shards (`data_parallel`), or a stage of a pipeline (`pipeline`), on the profile of a rank.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from cotrain_compile.cluster.composed.divided import Divided, rank_profile
from cotrain_compile.cluster.composed.links import MeshLinks, Way
from cotrain_compile.cluster.data_parallel.data_parallel import (
    SHARD,
    DataParallelPlan,
    LayersAs,
    ranks_of,
    sizes_of,
)
from cotrain_compile.cluster.data_parallel.step import Replicas, Sharding
from cotrain_compile.cluster.model.layout import Layout
from cotrain_compile.cluster.model.profiles import LayerProfile, ways_of
from cotrain_compile.cluster.pipeline.cuts import PipelineDevices, PipelineOrder
from cotrain_compile.cluster.pipeline.pipeline import (
    Batches,
    Beside,
    PipelinePlan,
    least_of,
    once_s,
    plans_at,
)
from cotrain_compile.cluster.steps.stage_step import Ring

# GPipe takes as long, and keeps more.
ORDER = PipelineOrder.ONE_F_ONE_B


class RankLayers:
    """The layers of a rank by how they are divided, each worked out once."""

    def __init__(self, profile: LayerProfile) -> None:
        self.whole = profile
        self._found: dict[Divided, tuple[LayerProfile, Sequence[LayersAs]]] = {}
        self._seconds: dict[tuple[Divided, int], tuple[float, float]] = {}

    def profile(self, divided: Divided) -> LayerProfile:
        return self._of(divided)[0]

    def ways(self, divided: Divided) -> Sequence[LayersAs]:
        """As they are, and run again."""
        return self._of(divided)[1]

    def again_s(self, divided: Divided, samples: int) -> tuple[float, float]:
        """Of a micro-batch whose layers run again: all of them, and the longest."""
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
class Option:
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
    def ways(self) -> Mapping[str, Way]:
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
    def beside(self) -> Beside:
        """What the ranks of a stage exchange."""
        return Beside(self.rings, self.layout.experts > 1)

    def options(self) -> Iterator[Option]:
        """All of them."""
        yield from self._in_stages() if self.layout.pipeline > 1 else self._alone()

    def _alone(self) -> Iterator[Option]:
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
            yield Option(self, found, choice.least_s, choice)

    def _in_stages(self) -> Iterator[Option]:
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
            yield Option(self, found, fastest * least_s, Batches(each, count, recompute=True))

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
