"""Memory limit: what a model takes of a cluster's memory at least, whatever the strategy.

In: a `Question`. Out: the `Memory` that it is about, and of a strategy that does not fit what its
parts alone are short of, or that smaller pieces may fit. No torch.

Parameters, gradients and optimizer states rest somewhere, each once: an update waits for all
gradients, as one that clips them does, and micro-batches add them up in their parameter's type.
Beside them a device works on a layer, with one sample, and runs it again for its backward.
"""

from __future__ import annotations

from cotrain_compile.cluster.model.description import first_devices
from cotrain_compile.cluster.model.machines import machines_by_kind
from cotrain_compile.cluster.model.profiles import Layer
from cotrain_compile.cluster.model.strategy import Memory, Question
from cotrain_compile.support.units import format_bytes

_BY_TENSOR = (
    "that is by whole layers: --rank-plan says of a traced step whether tensor by tensor fits"
)
_RESTS = "parameters, gradients and optimizer states"


def memory_of(question: Question) -> Memory:
    """What the model takes at least, what devices and their hosts have, and whether that is less.

    What a layer takes at work counts as nothing where its peak is not known.
    """
    layers, cluster = question.profile.layers, question.cluster
    worked = [group for group in cluster.groups if group.devices]
    largest = max(layers, key=_at_work_bytes)
    found = Memory(
        parameters_bytes=sum(layer.param_bytes + layer.buffer_bytes for layer in layers),
        gradients_bytes=sum(layer.grad_bytes for layer in layers),
        states_bytes=sum(layer.state_bytes for layer in layers),
        working_bytes=round(max(map(_beside_bytes, layers))),
        devices_bytes=sum(cluster.capacities_bytes),
        hosts_bytes=sum(group.count * group.host.capacity_bytes for group in worked),
        largest_layer_bytes=round(_at_work_bytes(largest)),
        largest_device_bytes=max(cluster.capacities_bytes),
    )
    return found.saying(question.profile.name, cluster.name, largest.name)


def parts_missing(question: Question, name: str) -> str:
    """What the parts in which strategy `name` has the model are short of, at rest alone; "" where
    they are not, or it has it in no such parts.

    A rank whose parts are not may be planned tensor by tensor (`rank_plan`).
    """
    if name in ("replicate", "byteps", "shard"):
        return _of_ranks(question, name)
    if name.startswith("pipeline"):
        return _of_stages(question)
    return ""


def _of_ranks(question: Question, name: str) -> str:
    """Equal parts, or copies, on so many devices as leave least missing."""
    cluster, rests = question.cluster, question.profile.resting_bytes
    counts = [n for n in range(1, len(cluster.devices) + 1) if question.samples % n == 0]
    found = []
    for count in counts:
        part = first_devices(cluster, count)
        machines = machines_by_kind(part)
        rooms = zip(part.capacities_bytes, part.kinds, strict=True)
        room = min(capacity + machines[kind].host.capacity_bytes for capacity, kind in rooms)
        own = -(-rests // count) if name == "shard" else rests
        found.append((own - room, count, own, room))
    missing, count, own, room = min(found)
    if missing <= 0:
        return "" if name == "byteps" else _BY_TENSOR
    what = f"one of {count} equal parts of" if name == "shard" and count > 1 else "a copy of"
    return (
        f"{what} {_RESTS} is {format_bytes(own)}, and the smallest device with its share of the "
        f"host has {format_bytes(room)}"
    )


def _of_stages(question: Question) -> str:
    """Stages hold parameters and gradients on their devices, and buffers."""
    layers = question.profile.layers
    held = sum(layer.param_bytes + layer.buffer_bytes + layer.grad_bytes for layer in layers)
    room = sum(question.cluster.capacities_bytes)
    if held <= room:
        return ""
    return (
        "stages hold parameters and gradients on their devices, which is "
        f"{format_bytes(held)}, and all devices have {format_bytes(room)}"
    )


def _at_work_bytes(layer: Layer) -> float:
    """Of one sample; 0 where nobody knows."""
    return layer.backward_peak(1) if layer.backward_peak_bytes else 0.0


def _beside_bytes(layer: Layer) -> float:
    """What both passes take beside parameters, buffers and gradients."""
    held = layer.param_bytes + layer.buffer_bytes
    forward = layer.forward_peak(1) if layer.forward_peak_bytes else 0.0
    return max(0.0, forward - held, _at_work_bytes(layer) - held - layer.grad_bytes)
