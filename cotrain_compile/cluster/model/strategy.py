"""Strategy: what one way to train a model on a cluster takes, and all of them as one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cotrain_compile.cluster.model.description import Cluster
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.plan import Timeline
from cotrain_compile.support.units import format_bytes, format_seconds

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Question:
    """A model, a cluster, and the samples of a step over all devices."""

    profile: LayerProfile
    cluster: Cluster
    samples: int

    @property
    def least_device_s(self) -> float:
        """Device-seconds of computing, each layer once, that no micro-batches pass under."""
        fastest = min(self.profile.times_slower([kind]) for kind in set(self.cluster.kinds))
        return (
            fastest
            * self.samples
            * min(
                sum(layer.compute_s(each) for layer in self.profile.layers) / each
                for each in range(1, self.samples + 1)
            )
        )


@dataclass(frozen=True)
class Memory:
    """What a model takes of a cluster at least, and what devices and the hosts of these have.

    Parameters are with buffers. `working_bytes` is beside them what the fullest layer takes at work
    on one sample, `largest_layer_bytes` all that one device has then. `limit` says in one sentence
    what is passed, "" where nothing is: then only the parts of each strategy can be too large.
    """

    parameters_bytes: int
    gradients_bytes: int
    states_bytes: int
    working_bytes: int
    devices_bytes: int
    hosts_bytes: int
    largest_layer_bytes: int
    largest_device_bytes: int
    limit: str = ""

    @property
    def needs_bytes(self) -> int:
        """At least."""
        rests = self.parameters_bytes + self.gradients_bytes + self.states_bytes
        return rests + self.working_bytes

    @property
    def has_bytes(self) -> int:
        return self.devices_bytes + self.hosts_bytes

    def saying(self, model: str, cluster: str, layer: str) -> Memory:
        """The same with its `limit`, of a model whose largest layer has that name."""
        limit = ""
        if self.needs_bytes > self.has_bytes:
            limit = (
                f"{model} takes {format_bytes(self.needs_bytes)} at least "
                f"({format_bytes(self.parameters_bytes)} of parameters, "
                f"{format_bytes(self.gradients_bytes)} of gradients, "
                f"{format_bytes(self.states_bytes)} of optimizer states, "
                f"{format_bytes(self.working_bytes)} for a layer at work on one sample), and "
                f"{cluster} has {format_bytes(self.has_bytes)} "
                f"({format_bytes(self.devices_bytes)} on devices, "
                f"{format_bytes(self.hosts_bytes)} on their hosts)"
            )
        elif self.largest_layer_bytes > self.largest_device_bytes:
            limit = (
                f"{layer} of {model} takes {format_bytes(self.largest_layer_bytes)} at work on one "
                f"sample, and the largest device of {cluster} has "
                f"{format_bytes(self.largest_device_bytes)}"
            )
        return replace(self, limit=limit)


_SPENT = {
    "computing": "of computing",
    "exchanges": "of waiting for exchanges",
    "hosts": "of waiting for hosts",
    "other ranks": "of waiting for other ranks",
}
# Of the best step: less is not what makes another one slower.
_WORTH_TELLING = 0.002


@dataclass(frozen=True)
class RankedStrategy:
    """What a step takes. Seconds are None, and `devices` 0, where `reason` says why.

    `bound_s` is what no timing of the same works can beat. `peak_bytes` is by device, None where
    nobody knows; `fits` is None then too. `traffic` has the bytes of a step over each kind of link,
    all devices together. `busiest` is the lane that has most to do, for `busiest_s`; `spent_s` says
    what the seconds of the step go to (`cluster.steps.spent`), where that is known. `setting` says
    what was chosen, `loses` why another one is better, `run` how to run it; `stages` is what
    `cotrain_compile.pipeline` runs, `widths` by name of module what `cotrain_compile.burst` does,
    `layout` the mesh of what runs on one, with `stages` where it has a pipeline.
    `capacities_bytes` is by device as `peak_bytes`; `host_bytes` rest on all hosts together;
    `timeline` is of all devices, those that do the same at the same time on one lane.
    """

    name: str
    step_s: float | None = None
    bound_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: tuple[int, ...] | None = None
    devices: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    fits: bool | None = None
    reason: str = ""
    busiest: str = ""
    busiest_s: float = 0.0
    setting: str = ""
    loses: str = ""
    run: str = ""
    stages: StagePlan | None = None
    layout: Layout | None = None
    widths: Mapping[str, int] = field(default_factory=dict)
    capacities_bytes: tuple[int, ...] = ()
    host_bytes: int = 0
    timeline: Timeline | None = None
    spent_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def spent(self) -> str:
        """What its seconds go to, in words; "" where that is not known."""
        said = [
            f"{format_seconds(seconds)} {_SPENT[what]}" for what, seconds in self.spent_s.items()
        ]
        return " and ".join(filter(None, (", ".join(said[:-1]), *said[-1:])))

    def more_than(self, best: RankedStrategy) -> str:
        """Of which seconds it has more than `best`, and less, by how much; most of it first."""
        if not (self.spent_s and best.spent_s):
            return f"{self.busiest} is busy {format_seconds(self.busiest_s)}"
        assert best.step_s is not None  # seconds are spent of a step
        found = {what: self.spent_s.get(what, 0.0) - best.spent_s.get(what, 0.0) for what in _SPENT}
        worth = {what: s for what, s in found.items() if abs(s) >= _WORTH_TELLING * best.step_s}
        return ", ".join(
            f"{format_seconds(abs(s))} {'more' if s > 0 else 'less'} {_SPENT[what]}"
            for what, s in sorted(worth.items(), key=lambda each: -each[1])
        )


@dataclass(frozen=True)
class Answer:
    """Strategies for steps of so many samples, the best first; `assumed` is what nobody knows.

    `memory` is None in answers of versions that did not say it.
    """

    profile: str
    cluster: str
    samples: int
    strategies: tuple[RankedStrategy, ...]
    assumed: tuple[str, ...] = ()
    memory: Memory | None = None

    def __post_init__(self) -> None:
        names = [strategy.name for strategy in self.strategies]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"an answer has one or more strategies, each once, not {names}")

    @property
    def best(self) -> RankedStrategy | None:
        """The fastest of those that fit or may fit; None where there is none."""
        first = self.strategies[0]
        return None if first.step_s is None or first.fits is False else first

    @property
    def why_none(self) -> str:
        """In one sentence why there is no best; "" where there is one, or nobody knows."""
        if self.best or self.memory is None or all(one.fits is None for one in self.strategies):
            return ""
        if self.memory.limit:
            return f"Nothing can fit: {self.memory.limit}."
        return (
            f"None of these fits, though {self.profile} takes "
            f"{format_bytes(self.memory.needs_bytes)} at least, and {self.cluster} has "
            f"{format_bytes(self.memory.has_bytes)}: each of them has the model in parts that some "
            "device or host has no room for."
        )

    def figures(self) -> dict[str, Any]:
        """All that is said, as JSON has it; timelines are only in saved answers and on pages."""
        without = tuple(replace(one, timeline=None) for one in self.strategies)
        figures = asdict(replace(self, strategies=without))
        for one in figures["strategies"]:
            del one["timeline"]
        if self.memory:
            totals = {"needs_bytes": self.memory.needs_bytes, "has_bytes": self.memory.has_bytes}
            figures["memory"] |= totals
        return figures | {"why_none": self.why_none}
