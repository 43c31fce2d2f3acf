"""Stages: cut a chain of layers over devices so that the largest peak is as small as possible.

In: what each layer needs alone and what it adds behind others (`LayerPeaks`), the capacity of each
device in the order of the pipeline. Out: `Stages`, with the peak of each device and the names of
the modules at which the model is split.

The memory model is that of mCAP (Euro-Par 2022) and CAPSlog (PDP 2024): a stage that holds layers
i..j takes `isolated[i] + added[i+1] + ... + added[j]` for one micro-batch, and for each further
micro-batch in flight what its layers keep until their backward. Where it is known what a layer
takes only while it computes, that comes on top, of the layer of the stage that takes most. Both
cuts are exact, also where devices differ.

`devices_of` is what a pipeline knows of the devices of a cluster, one behind the other: the machine
of each rank, whose network joins it to the next one, of which kind its device is, on which host.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

from cotrain_compile.cluster.model.description import Cluster
from cotrain_compile.cluster.model.machines import rank_machine
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.steps.stage_step import Rank
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine, Network


@dataclass(frozen=True)
class PipelineDevices:
    """Devices in order; what the d-th sends to the next one goes over the network of its machine.

    `kinds` are the names of their machines, for a profile that knows several. `hosts` says on which
    host each one is; without, nothing can rest there.
    """

    machines: tuple[Machine, ...]
    kinds: tuple[str, ...] = ()
    hosts: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.machines or not all(machine.network for machine in self.machines[:-1]):
            raise OptionError(
                "devices in a row are one or more, each with a network to the next, not "
                f"{len(self.machines)} of which {sum(not m.network for m in self.machines)} have "
                "none"
            )

    @property
    def capacity_bytes(self) -> tuple[int, ...]:
        return tuple(machine.device.capacity_bytes for machine in self.machines)

    def ranks(self, profile: LayerProfile) -> tuple[Rank, ...]:
        """One for each device, as many times slower as the profile says of its kind."""
        kinds = self.kinds or ("",) * len(self.machines)
        return tuple(
            Rank(machine, f"device{number}", profile.times_slower([kind]))
            for number, (machine, kind) in enumerate(zip(self.machines, kinds, strict=True))
        )

    def missing_on_hosts(self, nbytes: Sequence[int]) -> int:
        """What the fullest host has too little for so many bytes of each device.

        A host has what its devices have shares of, and they use it together.
        """
        left: Counter[tuple[int, int]] = Counter()
        for host, machine, own in zip(self.hosts, self.machines, nbytes, strict=True):
            left[host] += machine.host.capacity_bytes - own
        return max(0, *(-nbytes for nbytes in left.values()))


def devices_of(cluster: Cluster) -> PipelineDevices:
    """All devices of a cluster in their order, machine by machine."""
    shares = {
        (i, device): rank_machine(group, device)
        for i, group in enumerate(cluster.groups)
        for device in range(group.device_count)
    }
    hops = [*_hops(cluster), None]
    return PipelineDevices(
        tuple(
            shares[place.group, place.device].but(network=hop)
            for place, hop in zip(cluster.devices, hops, strict=True)
        ),
        cluster.kinds,
        tuple((place.group, place.machine) for place in cluster.devices),
    )


def _hops(cluster: Cluster) -> Iterator[Network]:
    """What joins each device to the next one."""
    for here, there in pairwise(cluster.devices):
        near = (here.group, here.machine) == (there.group, there.machine)
        ends = [cluster.groups[place.group] for place in (here, there)]
        known = [path for group in ends if (path := group.peers if near else group.nic)]
        rate = min(path.bytes_per_s for path in known)
        yield Network(rate, max(path.latency_s for path in known))


class PipelineOrder(StrEnum):
    """In which order a stage runs the forwards and backwards of its micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"

    def in_flight(self, micro_batches: int, devices: int, device: int) -> int:
        """Micro-batches whose activations a stage holds at once, at most."""
        if self is PipelineOrder.GPIPE:
            return micro_batches
        return min(micro_batches, devices - device)


@dataclass(frozen=True)
class LayerPeaks:
    """Bytes of each layer of a chain, for one micro-batch.

    `isolated_bytes[l]` is the peak of layer l alone on a device, `added_bytes[l]` what a stage that
    ends before l grows by when l joins it (the first layer's is never read), `kept_bytes[l]` what l
    keeps for its backward: a stage takes it once more for each further micro-batch in flight.
    `working_bytes[l]` is what l takes while it computes; none is given where the peaks have it.
    """

    names: tuple[str, ...]
    isolated_bytes: tuple[int, ...]
    added_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    working_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.working_bytes:
            object.__setattr__(self, "working_bytes", (0,) * len(self.names))
        columns = (self.isolated_bytes, self.added_bytes, self.kept_bytes, self.working_bytes)
        if not self.names or any(len(column) != len(self.names) for column in columns):
            sizes = ", ".join(str(len(column)) for column in columns)
            raise OptionError(
                f"{len(self.names)} layers have {sizes} isolated, added, kept and working "
                "sizes; give one of each for every layer"
            )
        for what, column in zip(("isolated", "added", "kept", "working"), columns, strict=True):
            if (least := min(column)) < 0:
                name = self.names[column.index(least)]
                raise OptionError(f"layer {name}: {what} bytes are below zero ({least})")


@dataclass(frozen=True)
class Stages:
    """Layers `bounds[d]` to before `bounds[d + 1]` are on device d; its peak is `peak_bytes[d]`."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]
    peak_bytes: tuple[int, ...]

    @property
    def split_points(self) -> tuple[str, ...]:
        """The layers at which a new stage begins, after the first stage."""
        used = sorted({bound for bound in self.bounds if 0 < bound < len(self.names)})
        return tuple(self.names[bound] for bound in used)


@dataclass(frozen=True)
class StageProblem:
    """A chain of layers, devices in the order of the pipeline, and the micro-batches in flight.

    At most `held` of these have what they keep on the device, where that is given.
    """

    layers: LayerPeaks
    capacity_bytes: tuple[int, ...]
    order: PipelineOrder = PipelineOrder.GPIPE
    micro_batches: int = 1
    held: int = 0

    def __post_init__(self) -> None:
        if not self.capacity_bytes or min(self.capacity_bytes) <= 0 or self.micro_batches < 1:
            raise OptionError(
                f"stages need devices with memory and micro-batches, not {self.capacity_bytes} "
                f"bytes and {self.micro_batches} micro-batches"
            )

    def peak_bytes(self, first: int, last: int, device: int) -> int:
        """What the layers `first` to before `last` take on a device; 0 where there are none."""
        if first == last:
            return 0
        layers = self.layers
        flight = self.on_device(device)
        alone = layers.isolated_bytes[first] + sum(layers.added_bytes[first + 1 : last])
        working = max(layers.working_bytes[first:last])
        return alone + (flight - 1) * sum(layers.kept_bytes[first:last]) + working

    def on_device(self, device: int) -> int:
        """Micro-batches whose activations a device holds at once, at most."""
        flight = self.order.in_flight(self.micro_batches, len(self.capacity_bytes), device)
        return min(flight, self.held or flight)

    def stages(self, bounds: Sequence[int]) -> Stages:
        """The peaks of a cut."""
        peaks = tuple(
            self.peak_bytes(first, last, device)
            for device, (first, last) in enumerate(pairwise(bounds))
        )
        return Stages(self.layers.names, tuple(bounds), peaks)

    def loads(self, stages: Stages) -> tuple[float, ...]:
        """What part of its capacity each device needs, the fullest one first."""
        shares = zip(stages.peak_bytes, self.capacity_bytes, strict=True)
        return tuple(sorted((peak / capacity for peak, capacity in shares), reverse=True))

    def fits(self, stages: Stages) -> bool:
        """Whether every device has the memory of its stage."""
        shares = zip(stages.peak_bytes, self.capacity_bytes, strict=True)
        return all(peak <= capacity for peak, capacity in shares)


def cut_stages(problem: StageProblem) -> Stages:
    """The cut with the smallest largest load; among these with the smallest second load, and so on.

    The load of a device is its peak over its capacity, compared exactly. Dynamic program over
    (device, layers so far): the loads of a cut, sorted with the largest first, are compared like
    words, and adding the same load to two of them does not change which comes first. So the best
    cut ends with a best cut of what is before its last stage. A device may stay without layers;
    that is taken only where it makes the loads smaller.
    """
    count, devices = len(problem.layers.names), len(problem.capacity_bytes)
    none: tuple[int, ...] = ()
    best: list[tuple[int, ...] | None] = [none] + [None] * count
    choices: list[list[int]] = []
    for device in range(devices):
        scaled = _scaled(problem, device)
        rows = [_best_last(best, last, scaled) for last in range(count + 1)]
        best = [loads for loads, _ in rows]
        choices.append([first for _, first in rows])
    bounds = [count]
    for firsts in reversed(choices):
        bounds.append(firsts[bounds[-1]])
    return problem.stages(bounds[::-1])


@dataclass(frozen=True)
class _Scaled:
    """The bytes of layers on one device, in units in which loads of all devices are whole."""

    alone: list[int]  # of a stage that begins at this layer and has no other
    before: list[int]  # added by all layers before this one
    working: list[int]  # while it computes

    def load(self, first: int, last: int, working: int) -> int:
        if first == last:
            return 0
        return self.alone[first] + self.before[last] - self.before[first + 1] + working


def _scaled(problem: StageProblem, device: int) -> _Scaled:
    layers = problem.layers
    unit = math.lcm(*problem.capacity_bytes) // problem.capacity_bytes[device]
    more = problem.on_device(device) - 1
    kept = [more * nbytes for nbytes in layers.kept_bytes]
    alone = [(peak + k) * unit for peak, k in zip(layers.isolated_bytes, kept, strict=True)]
    added = [(grow + k) * unit for grow, k in zip(layers.added_bytes, kept, strict=True)]
    working = [nbytes * unit for nbytes in layers.working_bytes]
    return _Scaled(alone, list(accumulate(added, initial=0)), working)


def _best_last(
    best: Sequence[tuple[int, ...] | None], last: int, scaled: _Scaled
) -> tuple[tuple[int, ...] | None, int]:
    """The best sorted loads with a stage that ends before `last`, and where that stage begins."""
    found: tuple[int, ...] | None = None
    begin = last
    working = 0
    for first in range(last, -1, -1):
        working = max(working, scaled.working[first]) if first < last else 0
        # What the layers after the first one add is a lower bound for all stages that begin
        # earlier.
        if found and first < last and scaled.before[last] - scaled.before[first + 1] > found[0]:
            break
        earlier = best[first]
        if earlier is None:
            continue
        load = scaled.load(first, last, working)
        if found and max(load, earlier[0] if earlier else 0) > found[0]:
            continue
        loads = _with(earlier, load)
        if found is None or loads < found:
            found, begin = loads, first
    return found, begin


def _with(loads: tuple[int, ...], load: int) -> tuple[int, ...]:
    place = bisect_right(loads, -load, key=lambda entry: -entry)
    return (*loads[:place], load, *loads[place:])


def cut_by_time(problem: StageProblem, seconds: Sequence[Sequence[float]]) -> Stages | None:
    """The cut that fits and whose slowest stage takes least; None where no cut fits.

    `seconds` are those of each layer, on each device. Dynamic program over (device, layers so far).
    """
    count, devices = len(problem.layers.names), len(problem.capacity_bytes)
    full = math.lcm(*problem.capacity_bytes)
    slowest = [0.0] + [math.inf] * count
    choices: list[list[int]] = []
    for device in range(devices):
        scaled = _scaled(problem, device)
        before_s = list(accumulate(seconds[device], initial=0.0))
        rows = [_fastest_last(slowest, last, scaled, full, before_s) for last in range(count + 1)]
        slowest = [seconds for seconds, _ in rows]
        choices.append([first for _, first in rows])
    if math.isinf(slowest[count]):
        return None
    bounds = [count]
    for firsts in reversed(choices):
        bounds.append(firsts[bounds[-1]])
    return problem.stages(bounds[::-1])


def _fastest_last(
    slowest: Sequence[float], last: int, scaled: _Scaled, full: int, before_s: Sequence[float]
) -> tuple[float, int]:
    """Seconds of the slowest stage where the last one ends before `last`, and where that begins."""
    found, begin, working = slowest[last], last, 0
    for first in range(last - 1, -1, -1):
        own_s = before_s[last] - before_s[first]
        if own_s >= found or scaled.before[last] - scaled.before[first + 1] > full:
            break
        working = max(working, scaled.working[first])
        if scaled.load(first, last, working) <= full and max(own_s, slowest[first]) < found:
            found, begin = max(own_s, slowest[first]), first
    return found, begin
