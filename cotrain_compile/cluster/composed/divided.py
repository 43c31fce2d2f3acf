"""Divided: the layers of one rank, where several divide each layer and its experts among them.

In: a profile whose layers say what of them can be divided, how many ranks do, and the networks that
these exchange over. Out: the profile of one such rank: of each layer its share of seconds, bytes
and peaks, with the seconds of the exchanges in its forward and backward, for which it waits.

    tensor     products and attention / t; two all-reduces in either pass. With `sequence` all of
               the layer / t, also what goes from layer to layer; a gather and a scatter, which are
               as many bytes, in place of each all-reduce
    experts    parameters of experts / e; each rank works on as many tokens as before, of e times as
               many samples, and two all-to-alls bring them and take them back

Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al., MLSys 2023 (sequence); Lepikhin et al., ICLR
2021 (experts). No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd

from cotrain_compile.cluster.model.profiles import (
    BATCH,
    BySamples,
    Division,
    Layer,
    LayerProfile,
    added,
)
from cotrain_compile.cluster.steps.stage_step import Does, Ring
from cotrain_compile.machine import Network


@dataclass(frozen=True)
class Divided:
    """In how many parts layers and experts are, and over what the ranks that have them exchange.

    A network is None where there is one part.
    """

    tensor: int = 1
    experts: int = 1
    sequence: bool = False
    tensor_network: Network | None = None
    experts_network: Network | None = None


def most_parts(profile: LayerProfile) -> tuple[int, int]:
    """Numbers of ranks that can divide layers, and experts, divide these; 1 where nothing can."""
    tensor = gcd(*(layer.tensor.most for layer in profile.layers if layer.tensor))
    experts = gcd(*(layer.experts.most for layer in profile.layers if layer.experts))
    return max(tensor, 1), max(experts, 1)


def rank_profile(profile: LayerProfile, divided: Divided) -> LayerProfile:
    """The layers of one of the ranks that divide them."""
    if divided.tensor == divided.experts == 1:
        return profile
    return replace(profile, layers=tuple(_layer(layer, divided) for layer in profile.layers))


def exchanged_bytes(
    layers: Sequence[Layer], divided: Divided, samples: int, forwards: int = 1
) -> tuple[float, float]:
    """What a rank sends for `layers` in so many forwards and a backward of so many samples: for
    tensors and experts."""
    tensor = experts = 0.0
    for layer in layers:
        for division, ring, does in _exchanges(layer, divided):
            times = forwards * division.times + _in_backward(layer, division)
            sent = ring.sent_bytes(does, division.exchanged.at(samples)) * times
            if does is Does.SUM:
                tensor += sent
            else:
                experts += sent
    return tensor, experts


def _in_backward(layer: Layer, division: Division) -> int:
    """How often it is exchanged there: nobody asks for the gradient of a batch, if that is what
    goes to experts, before which a layer has no parameters."""
    of_batch = all(read.source == BATCH for read in layer.reads)
    first = division is not layer.experts or division.params == 1.0
    return division.times - (of_batch and first and division.times > 0)


def _exchanges(layer: Layer, divided: Divided) -> Iterator[tuple[Division, Ring, Does]]:
    """What a layer exchanges in one pass. Of an all-to-all each rank keeps a part, as of a gather:
    it sends as many bytes."""
    if layer.tensor and divided.tensor_network:
        yield layer.tensor, Ring(divided.tensor_network, divided.tensor), Does.SUM
    if layer.experts and divided.experts_network:
        yield layer.experts, Ring(divided.experts_network, divided.experts), Does.GATHER


def _layer(layer: Layer, divided: Divided) -> Layer:
    t = divided.tensor if layer.tensor else 1
    computes, keeps, has = 1.0, 1.0, 1.0
    if layer.tensor and t > 1:
        computes, keeps, has = (
            1 - part + part / t
            for part in (layer.tensor.seconds, layer.tensor.kept, layer.tensor.params)
        )
        if divided.sequence:
            computes = keeps = 1 / t
    own = layer.experts
    if own and divided.experts > 1:
        expert = own.params / divided.experts
        has *= 1 - own.params + expert
        own = replace(own, params=expert / (1 - own.params + expert))
    entering = 1 / t if divided.sequence else 1.0
    params, grads = ceil(layer.param_bytes * has), ceil(layer.grad_bytes * has)
    whole = layer.tensor.exchanged if layer.tensor and divided.sequence else None

    def peak(table: BySamples | None, held: int, holds: int) -> BySamples | None:
        """Beside what rests, with what is gathered where the layers are divided by tokens."""
        if table is None:
            return None
        beside = tuple(holds + keeps * max(0.0, figure - held) for figure in table.figures)
        found = BySamples(table.samples, beside)
        return added(found, whole) if whole else found

    forward_s, backward_s = (
        added(seconds.times(computes), waits) if waits else seconds.times(computes)
        for seconds, waits in (
            (layer.forward_s, _waits(layer, divided)),
            (layer.backward_s, _waits(layer, divided, backward=True)),
        )
    )
    return replace(
        layer,
        reads=tuple(replace(read, nbytes=read.nbytes.times(entering)) for read in layer.reads),
        forward_s=forward_s,
        backward_s=backward_s,
        param_bytes=params,
        grad_bytes=grads,
        state_bytes=ceil(layer.state_bytes * has),
        host_update_s=layer.host_update_s * has,
        forward_peak_bytes=peak(layer.forward_peak_bytes, layer.param_bytes, params),
        backward_peak_bytes=peak(
            layer.backward_peak_bytes, layer.param_bytes + layer.grad_bytes, params + grads
        ),
        kept_bytes=layer.kept_bytes.times(keeps) if layer.kept_bytes else None,
        experts=own,
    )


def _waits(layer: Layer, divided: Divided, *, backward: bool = False) -> BySamples | None:
    """Seconds of all exchanges of one pass."""
    found: BySamples | None = None
    for division, ring, does in _exchanges(layer, divided):
        table = division.exchanged
        times = _in_backward(layer, division) if backward else division.times
        seconds = tuple(times * ring.seconds(does, nbytes) for nbytes in table.figures)
        one = BySamples(table.samples, seconds)
        found = added(found, one) if found else one
    return found
