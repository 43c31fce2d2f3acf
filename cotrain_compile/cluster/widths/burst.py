"""Burst plan: widths of layers on a cluster, with updates and the peak of the fullest device.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: a `BurstPlan`, the fastest that fits.
The widths are `plan_widths`'; what is added is the update of all parameters by the first device,
which has every layer, and its peak. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from cotrain_compile.cluster.model.description import Cluster, first_devices
from cotrain_compile.cluster.model.machines import machines_by_kind
from cotrain_compile.cluster.model.profiles import (
    Layer,
    LayerProfile,
    Read,
    constant,
    knows_peaks,
    units_of,
    ways_of,
)
from cotrain_compile.cluster.steps.rank_memory import ON_DEVICE, RankMemory, WorkingMemory
from cotrain_compile.cluster.steps.stage_step import Does, Rank
from cotrain_compile.cluster.widths.width_search import WidthPlan, WidthProblem, plan_widths
from cotrain_compile.machine import NETWORK, Network
from cotrain_compile.plan import Span, Timeline

_ALONE = Network(1.0)  # one device sends nothing
_Part = tuple[tuple[str, ...], str, float]  # lanes, what is done there, seconds


@dataclass(frozen=True)
class BurstPlan:
    """Widths by layer. `compute_s` and `network_s` are what the first device is busy with each.

    `peak_bytes` is its peak, None where the profile knows no peaks.
    """

    widths: Mapping[str, int]
    devices: int
    recompute: bool
    seconds: float
    compute_s: float
    network_s: float
    peak_bytes: int | None
    missing_bytes: int
    traffic: Mapping[str, int]
    timeline: Timeline

    @property
    def bound_s(self) -> float:
        """The busier of its two lanes."""
        return max(self.compute_s, self.network_s)

    @property
    def busiest(self) -> tuple[str, float]:
        """That lane, and its seconds."""
        if self.compute_s >= self.network_s:
            return "compute", self.compute_s
        return NETWORK, self.network_s


def plan_burst(profile: LayerProfile, cluster: Cluster, samples: int) -> BurstPlan:
    """The fastest that fits, on any number of the first devices; else the nearest to it."""
    plans = [
        _planned(way, first_devices(cluster, count), samples, recompute=recompute)
        for count in _powers_of_two(len(cluster.devices))
        for way, recompute in ways_of(profile)
    ]
    return min(plans, key=lambda plan: (plan.missing_bytes, plan.seconds))


def _powers_of_two(most: int) -> Iterator[int]:
    """Widths are of these."""
    return (1 << i for i in range(most.bit_length()))


def _planned(profile: LayerProfile, part: Cluster, samples: int, *, recompute: bool) -> BurstPlan:
    profile = profile.on(part.kinds)
    problem = WidthProblem(profile, part.ring or _ALONE, samples, len(part.devices))
    plan = plan_widths(problem)
    units = units_of(profile)
    update_s = max(
        Rank(machine, "").seconds(Does.UPDATE, sum(unit.touched_bytes for unit in units))
        for machine in machines_by_kind(part).values()
    )
    widths = [(layer, plan.widths[layer.name]) for layer in profile.layers]
    compute_s = sum(layer.compute_s(samples / width) for layer, width in widths)
    sync_s = sum(problem.sync_s(layer, width) for layer, width in widths)
    peak = None
    if knows_peaks(profile):
        working = WorkingMemory(_at_widths(profile, plan, samples), 1)
        peak = RankMemory(working, 1, streamed=False).peak_bytes(ON_DEVICE)
    return BurstPlan(
        plan.widths,
        max(plan.widths.values()),
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
    for layer in profile.layers:
        width = plan.widths[layer.name]
        if width > 1:
            moved["sums of gradients"] += width * layer.grad_bytes
        for read in layer.reads:
            if read.source:
                before = plan.widths[read.source]
                part = abs(before - width) / max(before, width)
                moved["between widths"] += round(2 * part * read.nbytes.at(samples))
    return {link: nbytes for link, nbytes in moved.items() if nbytes}


def width_timeline(problem: WidthProblem, widths: Mapping[str, int], update_s: float) -> Timeline:
    """The step as a timeline of its devices, which takes as long as the plan says.

    All forwards, all backwards, the sums of gradients as DeepPool counts them, behind what was
    computed, and the update, one part after the other. Devices that always work together share a
    lane.
    """
    lanes = device_lanes(widths)
    everywhere = tuple(lanes.values())
    layers = problem.profile.layers
    forth = [
        part for layer in layers for part in _layer_parts(problem, layer, widths, lanes, "forward")
    ]
    back = [
        part
        for layer in reversed(layers)
        for part in _layer_parts(problem, layer, widths, lanes, "backward")
    ]
    sums = [
        ((NETWORK,), f"sum of {layer.name}", problem.sync_s(layer, widths[layer.name]))
        for layer in layers
    ]
    spans, now_s = [], 0.0
    for on, name, seconds in (*forth, *back, *sums, (everywhere, "update", update_s)):
        if seconds:
            spans += [Span(lane, name, now_s, now_s + seconds) for lane in on]
            now_s += seconds
    return Timeline("predicted", tuple(spans), {})


def device_lanes(widths: Mapping[str, int]) -> dict[int, str]:
    """Lanes by the width from which on their devices work: `devices 4 to 7` from 8 on."""
    edges = (0, *sorted(set(widths.values())))
    return {
        end: f"device {first}" if end - first == 1 else f"devices {first} to {end - 1}"
        for first, end in pairwise(edges)
    }


def _layer_parts(
    problem: WidthProblem,
    layer: Layer,
    widths: Mapping[str, int],
    lanes: Mapping[int, str],
    kind: str,
) -> Iterator[_Part]:
    """A layer's forward after what comes to it, or its backward before that goes back."""
    width = widths[layer.name]
    share = problem.batch / width
    seconds = (layer.forward_s if kind == "forward" else layer.backward_s).at(share)
    on = tuple(lane for end, lane in lanes.items() if end <= width)
    turn = (on, f"{kind} of {layer.name}", seconds)
    (read,) = layer.reads
    both_s = problem.transfer_s(layer, widths.get(read.source, width), width)
    sent = ((NETWORK,), f"to {layer.name}, {kind}", both_s / 2)
    yield from (sent, turn) if kind == "forward" else (turn, sent)
