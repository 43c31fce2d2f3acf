"""Layer profile: a model as layers that read one another, with what each takes at any batch size.

Seconds and bytes of a layer are functions of the samples in a micro-batch. From a traced step, or
from measurements (`profile_files`). The planners of a cluster see a model as this only. No torch.

Planners that exchange, fetch and update several layers at once join them to `Unit`s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite

from cotrain_compile.errors import OptionError

FORMAT_VERSION = 1

# What a layer reads that reads no other layer: the samples themselves.
BATCH = ""


@dataclass(frozen=True)
class BySamples:
    """A figure by the number of samples, known at some numbers of them.

    Between two known numbers it is linear. Beyond the first and the last it goes on as between the
    two nearest, but never below zero, and no larger batch takes less than the last known one. A
    figure that is known once only is the same at every number.
    """

    samples: tuple[int, ...]
    figures: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples or len(self.samples) != len(self.figures):
            raise ValueError(
                f"{len(self.figures)} figures at {len(self.samples)} numbers of samples; there "
                "must be one for each, and at least one"
            )
        if self.samples[0] < 1 or any(a >= b for a, b in pairwise(self.samples)):
            raise ValueError(f"samples {self.samples} must rise and be at least 1")
        if not all(isfinite(figure) and figure >= 0 for figure in self.figures):
            raise ValueError(f"figures {self.figures} must be finite and not negative")

    def at(self, samples: float) -> float:
        """The figure for so many samples; `OptionError` where there are none."""
        if not samples > 0:
            raise OptionError(f"a micro-batch has at least one sample, not {samples}")
        if len(self.samples) == 1:
            return self.figures[0]
        after = min(max(bisect_right(self.samples, samples), 1), len(self.samples) - 1)
        x0, x1 = self.samples[after - 1], self.samples[after]
        y0, y1 = self.figures[after - 1], self.figures[after]
        if samples == x0:
            return y0
        if samples >= x1:
            return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (samples - x1)
        return max(0.0, y0 + (y1 - y0) / (x1 - x0) * (samples - x0))

    def times(self, factor: float) -> BySamples:
        """Every figure so many times."""
        return BySamples(self.samples, tuple(factor * figure for figure in self.figures))


def per_sample(figure: float) -> BySamples:
    """`figure` for every sample, and nothing beside that."""
    return BySamples((1, 2), (figure, 2 * figure))


def constant(figure: float) -> BySamples:
    """The same however many samples there are."""
    return BySamples((1,), (figure,))


@dataclass(frozen=True)
class Read:
    """What comes to a layer from the layer `source`, or from the batch (""), in the forward.

    As many bytes go back in the backward, as a gradient, unless they come from the batch.
    """

    source: str
    nbytes: BySamples


@dataclass(frozen=True)
class Division:
    """What of a layer ranks may divide among them, by any number of them that divides `most`.

    `seconds`, `params` and `kept` are parts of the whole, from 0 to 1: of its forward and backward,
    of its parameters (as of gradients and states), of what it keeps. Ranks that divide it exchange
    `exchanged` bytes, `times` in its forward and as often in its backward.
    """

    most: int
    seconds: float
    params: float
    kept: float
    exchanged: BySamples
    times: int = 2

    def __post_init__(self) -> None:
        parts = (self.seconds, self.params, self.kept)
        if self.most < 1 or self.times < 0 or not all(0 <= part <= 1 for part in parts):
            raise ValueError(f"{self!r}: parts are from 0 to 1, and most is at least 1")


@dataclass(frozen=True)
class Layer:
    """A layer: `name` is its module where there is one, `op` says what it does.

    `backward_s` is without the forward that may run again before it. `host_update_s` is what the
    host takes for the update of its parameters. The peaks are bytes on a device that runs this
    layer alone, with parameters (and gradients in the backward) but without what it reads. What is
    `kept` rests from forward to backward where nothing is made again. None: nobody has measured it.
    `tensor` and `experts` say what of it several ranks can divide; None: nothing, or nobody knows.
    """

    name: str
    op: str
    reads: tuple[Read, ...]
    forward_s: BySamples
    backward_s: BySamples
    param_bytes: int
    grad_bytes: int
    state_bytes: int = 0
    buffer_bytes: int = 0
    host_update_s: float = 0.0
    forward_peak_bytes: BySamples | None = None
    backward_peak_bytes: BySamples | None = None
    kept_bytes: BySamples | None = None
    tensor: Division | None = None
    experts: Division | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.reads:
            raise ValueError(f"layer {self.name!r} needs a name and something that it reads")
        sources = [read.source for read in self.reads]
        if len(set(sources)) != len(sources):
            raise ValueError(f"layer {self.name} reads one layer twice; give the bytes together")
        for what in ("param_bytes", "grad_bytes", "state_bytes", "buffer_bytes", "host_update_s"):
            if not 0 <= getattr(self, what) < float("inf"):
                raise ValueError(f"layer {self.name}: {what} must be finite and not negative")

    @property
    def resting_bytes(self) -> int:
        """Parameters, buffers, gradients and optimizer states."""
        return self.param_bytes + self.buffer_bytes + self.grad_bytes + self.state_bytes

    @property
    def touched_bytes(self) -> int:
        """What an update reads and writes: parameters and states both, gradients are only read."""
        return 2 * (self.param_bytes + self.state_bytes) + self.grad_bytes

    def input_bytes(self, samples: float) -> float:
        """What comes to it from all that it reads."""
        return sum(read.nbytes.at(samples) for read in self.reads)

    def compute_s(self, samples: float) -> float:
        """Forward and backward, each once."""
        return self.forward_s.at(samples) + self.backward_s.at(samples)

    def forward_peak(self, samples: float) -> float:
        """Bytes, or `OptionError` where they are not known; so are the next two."""
        return self._known("forward_peak_bytes", self.forward_peak_bytes).at(samples)

    def backward_peak(self, samples: float) -> float:
        return self._known("backward_peak_bytes", self.backward_peak_bytes).at(samples)

    def kept(self, samples: float) -> float:
        return self._known("kept_bytes", self.kept_bytes).at(samples)

    def _known(self, what: str, table: BySamples | None) -> BySamples:
        if table is None:
            raise OptionError(
                f"layer {self.name} has no {what} in this profile; take a profile of a traced "
                "step, or a strategy that needs no peaks"
            )
        return table


@dataclass(frozen=True)
class LayerProfile:
    """The layers of a model, each after those that it reads.

    `assumed` says, in a sentence each, which figures nobody has measured. A sample is
    `tokens_per_sample` tokens (1: an image, or whatever is counted). Seconds are of one kind of
    device; `slowness` has how many times as long other kinds take, by the names of their machines.
    """

    name: str
    layers: tuple[Layer, ...]
    source: str = ""
    assumed: tuple[str, ...] = ()
    tokens_per_sample: int = 1
    slowness: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile has at least one layer")
        if not all(0 < times < float("inf") for times in self.slowness.values()):
            raise ValueError(f"slowness {dict(self.slowness)} must be positive and finite")
        if self.tokens_per_sample < 1:
            raise ValueError("tokens_per_sample must be at least 1")
        before = {BATCH}
        for layer in self.layers:
            if layer.name in before:
                raise ValueError(f"two layers are named {layer.name}")
            unknown = [read.source for read in layer.reads if read.source not in before]
            if unknown:
                raise ValueError(f"layer {layer.name} reads {unknown}, no layers before it")
            before.add(layer.name)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The place of each layer by its name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """The layers that read each layer, by its name, in order; the batch's under ""."""
        found: dict[str, list[str]] = {BATCH: [], **{layer.name: [] for layer in self.layers}}
        for layer in self.layers:
            for read in layer.reads:
                found[read.source].append(layer.name)
        return {name: tuple(readers) for name, readers in found.items()}

    @property
    def is_chain(self) -> bool:
        """Whether each layer reads the one before it and nothing else."""
        sources = [BATCH, *(layer.name for layer in self.layers)]
        return all(
            [read.source for read in layer.reads] == [source]
            for layer, source in zip(self.layers, sources, strict=False)
        )

    def times_slower(self, kinds: Iterable[str]) -> float:
        """How many times as long the slowest of these kinds takes; 1 if none is known."""
        return max((self.slowness.get(kind, 1.0) for kind in kinds), default=1.0)

    def on(self, kinds: Iterable[str]) -> LayerProfile:
        """The profile on devices that wait for the slowest of these kinds."""
        times = self.times_slower(kinds)
        if times == 1.0:
            return self
        layers = tuple(
            replace(
                layer,
                forward_s=layer.forward_s.times(times),
                backward_s=layer.backward_s.times(times),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, slowness={})

    @property
    def param_bytes(self) -> int:
        return sum(layer.param_bytes for layer in self.layers)

    @property
    def grad_bytes(self) -> int:
        return sum(layer.grad_bytes for layer in self.layers)

    @property
    def resting_bytes(self) -> int:
        """Parameters, buffers, gradients and optimizer states of all layers."""
        return sum(layer.resting_bytes for layer in self.layers)


def chain(tables: Sequence[BySamples], names: Sequence[str]) -> tuple[tuple[Read, ...], ...]:
    """What the layers of a chain read, from the bytes that come to each and their names."""
    sources = [BATCH, *names[:-1]]
    return tuple((Read(source, table),) for source, table in zip(sources, tables, strict=True))


# What is exchanged at once at least, as DistributedDataParallel has it.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Unit:
    """Consecutive layers whose parameters are gathered, and gradients summed, at once."""

    name: str
    layers: tuple[Layer, ...]

    @cached_property
    def param_bytes(self) -> int:
        return sum(layer.param_bytes for layer in self.layers)

    @cached_property
    def grad_bytes(self) -> int:
        return sum(layer.grad_bytes for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)

    @cached_property
    def expert_grad_bytes(self) -> float:
        """Of its gradients those of experts."""
        return sum(each.grad_bytes * each.experts.params for each in self.layers if each.experts)

    @property
    def resting_bytes(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.param_bytes + self.grad_bytes + self.state_bytes

    @property
    def touched_bytes(self) -> int:
        """What an update reads and writes."""
        return sum(layer.touched_bytes for layer in self.layers)

    def forward_s(self, samples: int) -> float:
        return sum(layer.forward_s.at(samples) for layer in self.layers)

    def backward_s(self, samples: int) -> float:
        return sum(layer.backward_s.at(samples) for layer in self.layers)

    def kept_bytes(self, samples: int) -> float:
        """From forward to backward, or `OptionError` where nobody knows it."""
        return sum(layer.kept(samples) for layer in self.layers)


def units_of(profile: LayerProfile) -> tuple[Unit, ...]:
    """All layers, as `units_in` has them."""
    return units_in(profile.layers)


def units_in(layers: Sequence[Layer]) -> tuple[Unit, ...]:
    """Layers in units of `BUCKET_BYTES` or more, from the back as gradients come."""
    units: list[Unit] = []
    held: list[Layer] = []
    for layer in reversed(layers):
        held.insert(0, layer)
        if sum(each.param_bytes for each in held) >= BUCKET_BYTES:
            units.insert(0, Unit(held[0].name, tuple(held)))
            held = []
    if held:
        units.insert(0, Unit(held[0].name, tuple(held)))
    return tuple(units)


def knows_peaks(profile: LayerProfile) -> bool:
    """Whether a peak can be told: of each layer that of the backward, and what it keeps."""
    return all(layer.backward_peak_bytes and layer.kept_bytes for layer in profile.layers)


def ways_of(profile: LayerProfile) -> list[tuple[LayerProfile, bool]]:
    """As it is, and with every layer run again; those of which peaks are known, if there are any.

    What layers that run again keep is their input, which every profile knows.
    """
    ways = [(profile, False), (running_again(profile), True)]
    return [way for way in ways if knows_peaks(way[0])] or ways[:1]


def running_again(profile: LayerProfile) -> LayerProfile:
    """Every layer keeps its input alone, and runs again before its backward.

    A peak is without what the layer reads, so that the input is counted beside it.
    """
    return replace(profile, layers=tuple(_running_again(layer) for layer in profile.layers))


def _running_again(layer: Layer) -> Layer:
    entering = layer.reads[0].nbytes
    for read in layer.reads[1:]:
        entering = added(entering, read.nbytes)
    peak = layer.backward_peak_bytes
    return replace(
        layer,
        backward_s=added(layer.backward_s, layer.forward_s),
        kept_bytes=entering,
        backward_peak_bytes=added(peak, entering) if peak else None,
    )


def added(one: BySamples, other: BySamples) -> BySamples:
    """Both together, at all numbers of samples at which either is known."""
    known = tuple(sorted({*one.samples, *other.samples}))
    return BySamples(known, tuple(one.at(n) + other.at(n) for n in known))
