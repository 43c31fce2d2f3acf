"""What does it take to start small tasks, by themselves and in bundles? Part of `issue_cost`.

On the emulated device, with no link to imitate: copies of 256 bytes and updates that do nothing are
started and waited for, one by one as the small tasks of a step are, and as one bundle. Processor
time of all threads, since the threads of lanes share one interpreter with the step's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cotrain_compile.machine import MEMORIES
from cotrain_compile.presets import THIS_MACHINE, find
from cotrain_compile.runtime.carry_out import bundle_of
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.ops import Bundle, Launch

FEW, MANY, ROUNDS = 16, 256, 101
ELEMENTS = 64


@dataclass(frozen=True)
class Way:
    """Starts tasks of one kind on a device: one by one, or as a bundle."""

    one: Callable[[EmulatedDevice, Launch], object]
    all: Callable[[EmulatedDevice, Bundle, int], object]


def ways() -> Mapping[str, Way]:
    """Copies down into new tensors, copies up over others, and updates."""
    source, over = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    region: Any = None
    return {
        "copies down": Way(
            lambda device, launch: device.offload(source, launch),
            lambda device, bundle, count: device.copy_all([source] * count, bundle, down=True),
        ),
        "copies up": Way(
            lambda device, launch: device.prefetch_into(over, source, launch),
            lambda device, bundle, count: device.copy_all_into(
                [over] * count, [source] * count, bundle, down=False
            ),
        ),
        "updates": Way(
            lambda device, launch: device.run_region(region, [over, source], launch),
            lambda device, bundle, count: device.run_regions(
                [region] * count, [[over, source]] * count, bundle
            ),
        ),
    }


def measured() -> dict[str, dict[str, float]]:
    """Of each kind the microseconds of a further task, by itself and in a bundle; of all the mean.

    `us_first` and `us_first_in_bundle` are what comes once: mostly a thread that is woken up.
    `member` is the share that a member takes of a task by itself.
    """
    found = {name: _measured(way) for name, way in ways().items()}
    mean = {key: statistics.mean(f[key] for f in found.values()) for key in found["updates"]}
    return {**found, "mean": {**mean, "member": mean["us_member"] / mean["us_alone"]}}


def _measured(way: Way) -> dict[str, float]:
    alone_s, first_s = _line(way, in_bundle=False)
    member_s, bundle_s = _line(way, in_bundle=True)
    return {
        "us_alone": 1e6 * alone_s,
        "us_member": 1e6 * member_s,
        "us_first": 1e6 * first_s,
        "us_first_in_bundle": 1e6 * bundle_s,
        "member": member_s / alone_s,
    }


def _line(way: Way, *, in_bundle: bool) -> tuple[float, float]:
    """Seconds of each further task, and those that come once; from medians."""
    few_s, many_s = (
        statistics.median(_seconds(way, count, in_bundle=in_bundle) for _ in range(ROUNDS))
        for count in (FEW, MANY)
    )
    each_s = (many_s - few_s) / (MANY - FEW)
    return each_s, few_s - FEW * each_s


def _seconds(way: Way, count: int, *, in_bundle: bool) -> float:
    launches = [Launch(f"task {n}", bundle=in_bundle * "all", small=True) for n in range(count)]
    bundle = bundle_of(launches)
    device = _device([*launches, bundle.launch])
    device.start_step()
    began_s = time.process_time()
    if in_bundle:
        way.all(device, bundle, count)
    else:
        for launch in launches:
            way.one(device, launch)
    device.wait([launch.task for launch in launches])
    return time.process_time() - began_s


def _device(launches: Sequence[Launch]) -> EmulatedDevice:
    budgets = dict.fromkeys(MEMORIES, 1 << 40)
    kernels = {launch.task: _no_work for launch in launches}
    return EmulatedDevice(find(THIS_MACHINE), budgets, kernels, poison=False)


def _no_work(*_: Any) -> None:
    """An update."""
