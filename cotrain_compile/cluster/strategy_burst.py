"""Burst plan: widths of layers on a cluster, with updates and the peak of the fullest device.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: a `BurstPlan`, the fastest that fits.
The widths are `plan_widths`' with no limit; what is added is the update of all parameters by the
first device, which has every layer, and its peak. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cotrain_compile.cluster.away import NOTHING
from cotrain_compile.cluster.data_parallel import memory_rates
from cotrain_compile.cluster.description import Cluster
from cotrain_compile.cluster.profiles import Layer, LayerProfile, Read, constant
from cotrain_compile.cluster.rank_memory import RankMemory, WorkingMemory
from cotrain_compile.cluster.subsets import first_devices
from cotrain_compile.cluster.units import knows_peaks, units_of, ways_of
from cotrain_compile.cluster.width_problem import WidthProblem
from cotrain_compile.cluster.width_timeline import width_timeline
from cotrain_compile.cluster.widths import WidthPlan, plan_widths
from cotrain_compile.machine import Network
from cotrain_compile.plan import Timeline

_ALONE = Network(1.0)  # one device sends nothing


@dataclass(frozen=True)
class BurstPlan:
    """Widths by layer. `compute_s` and `network_s` are what the first device is busy with each.

    `peak_bytes` is its peak, as if no layer ran beside, None where the profile knows no peaks. A
    profile with branches has no timeline.
    """

    widths: Mapping[str, int]
    devices: int
    recompute: bool
    step_s: float
    compute_s: float
    network_s: float
    peak_bytes: int | None
    missing_bytes: int
    traffic: Mapping[str, int]
    timeline: Timeline | None

    @property
    def bound_s(self) -> float:
        """The busier of its two lanes."""
        return max(self.compute_s, self.network_s)

    @property
    def network(self) -> tuple[str, float]:
        return "network", self.network_s


def plan_burst(profile: LayerProfile, cluster: Cluster, samples: int) -> BurstPlan:
    """The fastest that fits, on any number of the first devices; else the nearest to it."""
    plans = [
        _planned(way, first_devices(cluster, count), samples, recompute=recompute)
        for count in _counts(profile, len(cluster.devices))
        for way, recompute in ways_of(profile)
    ]
    return min(plans, key=lambda plan: (plan.missing_bytes, plan.step_s))


def _counts(profile: LayerProfile, devices: int) -> Iterator[int]:
    """Widths are powers of two; others give room to branches that run beside."""
    for count in range(1, devices + 1):
        if not profile.is_chain or count & (count - 1) == 0:
            yield count


def _planned(profile: LayerProfile, part: Cluster, samples: int, *, recompute: bool) -> BurstPlan:
    profile, count = profile.on(part.kinds), len(part.devices)
    problem = WidthProblem(profile, part.ring or _ALONE, samples, count)
    plan = plan_widths(problem)
    units = units_of(profile)
    update_s = sum(unit.touched_bytes for unit in units) / min(memory_rates(part).values())
    mine = [layer for layer in profile.layers if layer.name not in plan.beside]
    compute_s = sum(layer.compute_s(samples / plan.widths[layer.name]) for layer in mine)
    sync_s = sum(problem.sync_s(layer, plan.widths[layer.name]) for layer in mine)
    peak = None
    if knows_peaks(profile):
        working = WorkingMemory(_at_widths(profile, plan, samples), 1)
        peak = RankMemory(working, 1, streamed=False).peak_bytes(NOTHING)
    used = max(plan.widths.values()) if not plan.beside else count
    return BurstPlan(
        plan.widths,
        used,
        recompute,
        plan.step_s + update_s,
        compute_s + update_s,
        sync_s,
        peak,
        max(0, (peak or 0) - min(part.capacities_bytes)),
        _traffic(profile, plan, samples),
        width_timeline(problem, plan.widths, update_s),
    )


def _at_widths(profile: LayerProfile, plan: WidthPlan, samples: int) -> LayerProfile:
    """The profile with what each layer takes of its share of the samples, as constants."""
    return replace(
        profile,
        layers=tuple(
            _at_share(layer, samples / plan.widths[layer.name], plan, samples)
            for layer in profile.layers
        ),
    )


def _at_share(layer: Layer, share: float, plan: WidthPlan, samples: int) -> Layer:
    def widest(read: Read) -> Read:
        """What is read, where it is made or where it is read, whichever is more."""
        made = samples / plan.widths[read.source] if read.source else share
        return Read(read.source, constant(read.nbytes.at(max(made, share))))

    forward = layer.forward_peak_bytes
    return replace(
        layer,
        reads=tuple(map(widest, layer.reads)),
        kept_bytes=constant(layer.kept(share)),
        forward_peak_bytes=constant(forward.at(share)) if forward else None,
        backward_peak_bytes=constant(layer.backward_peak(share)),
    )


def _traffic(profile: LayerProfile, plan: WidthPlan, samples: int) -> dict[str, int]:
    """Gradients that are summed, once from each device, and what changes its devices, both ways."""
    moved: Counter[str] = Counter()
    beside = set(plan.beside)
    for layer in profile.layers:
        width = plan.widths[layer.name]
        if width > 1:
            moved["sums of gradients"] += width * layer.grad_bytes
        for read in layer.reads:
            if read.source:
                before = plan.widths[read.source]
                apart = (read.source in beside) != (layer.name in beside)
                part = 1.0 if apart else abs(before - width) / max(before, width)
                moved["between widths"] += round(2 * part * read.nbytes.at(samples))
    return {link: nbytes for link, nbytes in moved.items() if nbytes}
