"""Search: the fastest layout of a kind, and how its ranks run.

In: a profile, a cluster, the samples of a step, a kind of layouts (`KINDS`). Out: a `ComposedPlan`.
All sizes of a mesh are tried whose product is a number of devices (`_counts`), the first of the
cluster, and which divide what they have to: samples, layers, experts. Options go by what they take
at least; what is above the best so far is neither planned nor simulated. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil

from cotrain_compile.cluster.composed.divided import exchanged_bytes, most_parts
from cotrain_compile.cluster.composed.mesh import Mesh, MeshLinks, MeshOption, RankLayers
from cotrain_compile.cluster.data_parallel.data_parallel import DataParallelPlan
from cotrain_compile.cluster.model.description import Cluster, first_devices
from cotrain_compile.cluster.model.layout import Layout
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.pipeline.pipeline import PipelinePlan
from cotrain_compile.cluster.steps.fastest import fastest_option
from cotrain_compile.cluster.steps.stage_step import (
    EXCHANGES,
    Does,
    StageStep,
)
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.support.units import format_bytes

_STAGED_SHARDS = ("pipeline", "replicate", "shard")
# Each layout of two dimensions or more, or of divided layers or experts, is of one kind.
KINDS: Mapping[str, Callable[[Layout], bool]] = {
    "hsdp": lambda of: set(of.mesh) == {"replicate", "shard"},
    "pipeline-replicate": lambda of: set(of.mesh) == {"pipeline", "replicate"},
    "pipeline-shard": lambda of: {"pipeline", "shard"} <= set(of.mesh) <= {*_STAGED_SHARDS},
    "tensor": lambda of: of.tensor > 1 and of.pipeline == of.experts == 1,
    "pipeline-tensor": lambda of: of.tensor > 1 and of.pipeline > 1 and of.experts == 1,
    "experts": lambda of: of.experts > 1,
}
# Of up to so many devices every number is tried.
_EVERY_COUNT = 64


@dataclass(frozen=True)
class ComposedPlan:
    """A layout, and the plan of its ranks: all of them do the same, or all of a stage."""

    mesh: Mesh
    layout: Layout
    plan: DataParallelPlan | PipelinePlan

    @property
    def step(self) -> StageStep:
        return self.plan.step

    @property
    def ranks(self) -> int:
        """How many do what one of the step does."""
        return self.layout.devices // self.layout.pipeline

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of each device, in the order of ranks."""
        if isinstance(self.plan, PipelinePlan):
            return tuple(peak for peak in self.plan.cut.peak_bytes for _ in range(self.ranks))
        assert self.plan.peaks_bytes is not None  # only profiles that know peaks are planned
        return self.plan.peaks_bytes

    @property
    def host_bytes(self) -> int:
        """On all hosts together."""
        staged = isinstance(self.plan, PipelinePlan)
        return self.plan.host_bytes * (self.ranks if staged else 1)

    @property
    def passes(self) -> int:
        """How often a micro-batch goes through each layer."""
        return 3 if self.layout.recompute else 2

    @property
    def _last_begins(self) -> int:
        """The layer at which a stage begins that runs no layer again."""
        if isinstance(self.plan, PipelinePlan) and self.plan.stages.stages[-1].at_once:
            return self.plan.cut.bounds[-2]
        return len(self.mesh.layers.whole.layers)

    @property
    def exchanging(self) -> float:
        """The part of what a rank computes in which it waits for those that divide its layers."""
        own = replace(self.mesh.divided, tensor_network=None, experts_network=None)
        with_s, without_s = (
            sum(
                (self.passes - 1) * layer.forward_s.at(self.layout.micro_batch)
                + layer.backward_s.at(self.layout.micro_batch)
                for layer in profile.layers
            )
            for profile in (self.mesh.profile, self.mesh.layers.profile(own))
        )
        return 1 - without_s / with_s if with_s else 0.0

    def traffic(self) -> dict[str, int]:
        """Bytes of a step over each kind of link, all ranks together."""
        near = far = 0.0
        for nbytes, leaving in self._exchanged():
            near += self.ranks * nbytes * (1 - leaving)
            far += self.ranks * nbytes * leaving
        moved = self.step.moved_bytes
        return {
            "between devices of a machine": round(near),
            "between machines": round(far),
            "host to devices": self.ranks * ceil(moved[Does.FETCH]),
            "devices to host": self.ranks * ceil(moved[Does.STORE]),
        }

    def _exchanged(self) -> Iterator[tuple[float, float]]:
        """Bytes that one rank of each stage sends, and which part leaves a machine."""
        step, ways = self.step, self.mesh.ways
        first = "shard" if self.layout.shard > 1 else "data"
        for task in step.tasks:
            if task.does in EXCHANGES:
                sent = step.ring_of(task).sent_bytes(task.does, task.amount_of(0))
                yield sent, ways[task.over or first].leaving
        whole, each = self.mesh.layers.whole.layers, self.layout.micro_batch
        times = self.layout.micro_batches
        for layers, forwards in (
            (whole[: self._last_begins], self.passes - 1),
            (whole[self._last_begins :], 1),
        ):
            sizes = exchanged_bytes(layers, self.mesh.divided, each, forwards)
            for name, nbytes in zip(("tensor", "experts"), sizes, strict=True):
                if nbytes:
                    yield times * nbytes, ways[name].leaving
        if isinstance(self.plan, PipelinePlan):
            hops = self.mesh.links.hops(self.layout)
            yield from (
                (nbytes, way.leaving) for nbytes, way in zip(self.plan.hop_bytes, hops, strict=True)
            )


def plan_composed(profile: LayerProfile, cluster: Cluster, samples: int, kind: str) -> ComposedPlan:
    """The fastest of all layouts of `kind`, one of `KINDS`, that fit.

    Raises:
        OptionError: there are no such layouts, and why.
        PlacementError: none of them fits.
    """
    options = list(options_of(profile, cluster, samples, kind))
    found = fastest_option(options)
    if found is None:
        raise _nothing_fits(options, kind)
    number, plan = found
    return ComposedPlan(options[number].mesh, options[number].layout, plan)


def options_of(
    profile: LayerProfile, cluster: Cluster, samples: int, kind: str
) -> Iterator[MeshOption]:
    """All options of all layouts of a kind.

    Raises `OptionError` where there are none.
    """
    _require_known(profile)
    tensor, experts = most_parts(profile)
    layers, tried = RankLayers(profile), 0
    for count in _counts(cluster):
        links = MeshLinks(first_devices(cluster, count))
        for layout in _layouts(count, min(count, len(profile.layers)), tensor, experts):
            if not KINDS[kind](layout) or samples % layout.replicas:
                continue
            if layout.sequence and profile.tokens_per_sample % layout.tensor:
                layout = replace(layout, sequence=False)
            if layout.pipeline > 1 and not profile.is_chain:
                continue
            tried += 1
            yield from Mesh(layout, links, layers, samples).options()
    if not tried:
        raise _no_layouts(profile, cluster, samples, kind)


def _require_known(profile: LayerProfile) -> None:
    if not all(layer.backward_peak_bytes for layer in profile.layers):
        raise OptionError("the profile knows no peaks, so nobody knows which layouts fit")


def _counts(cluster: Cluster) -> list[int]:
    """All of the devices; of few every number, of many those of the first groups, and the largest
    power of two."""
    most = len(cluster.devices)
    if most <= _EVERY_COUNT:
        return list(range(most, 1, -1))
    groups = [group.count * group.device_count for group in cluster.groups]
    counts = {*accumulate(groups), 1 << (most.bit_length() - 1)}
    return sorted((count for count in counts if count > 1), reverse=True)


def _layouts(count: int, most_stages: int, tensor: int, experts: int) -> Iterator[Layout]:
    """All meshes of so many devices; layers are divided by tokens too."""
    for t in _divisors(count):
        if tensor % t:
            continue
        for e in _divisors(count // t):
            if experts % e:
                continue
            for p in _divisors(count // t // e):
                if p > most_stages:
                    continue
                left = count // t // e // p
                for s in _divisors(left):
                    yield Layout(p, left // s, s, e, t, sequence=t > 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _no_layouts(profile: LayerProfile, cluster: Cluster, samples: int, kind: str) -> OptionError:
    tensor, experts = most_parts(profile)
    devices = len(cluster.devices)
    if kind == "experts" and experts == 1:
        return OptionError(f"{profile.name} has no experts that ranks could divide")
    if "tensor" in kind and tensor == 1:
        return OptionError(
            f"nobody knows which ops of the layers of {profile.name} ranks could divide"
        )
    if kind.startswith("pipeline") and not profile.is_chain:
        return OptionError(f"{profile.name} has branches, and stages are stretches of a chain")
    return OptionError(
        f"{devices} device{'s' * (devices > 1)} and {samples} samples are in no such mesh"
    )


def _nothing_fits(options: list[MeshOption], kind: str) -> PlacementError:
    """What a rank of the layout with the smallest parts has to hold, wherever it rests."""

    def rests(option: MeshOption) -> float:
        parts = option.layout.pipeline * option.layout.shard
        return sum(layer.resting_bytes for layer in option.mesh.profile.layers) / parts

    least = min(options, key=rests)
    links = least.mesh.links
    machine, _ = links.slowest(0, least.layout.devices)
    room = machine.device.capacity_bytes + machine.host.capacity_bytes
    return PlacementError(
        f"no layout of this kind fits; the parts of {least.layout} are smallest, "
        f"{format_bytes(round(rests(least)))} a rank at rest, and the smallest device with its "
        f"share of the host has {format_bytes(room)} for them and for layers at work",
        shortfall_bytes=max(1, round(rests(least)) - room),
    )
