"""The schedules of ZeRO-Offload and of CoTrain as works: one training step, layer by layer.

In: seconds of every layer (`Layers`). Out: the works of one step for the simulator, joined to the
step before by `after_previous`. Layers run 0..n-1 in the forward, n-1..0 in the backward; the
gradient of a layer goes down the link, the host updates it, the weight comes back up.

ZeRO-Offload: gradients travel as they appear, every update waits for the whole backward, and the
next forward for every weight. CoTrain, coarse: an update starts when its gradient has landed, and a
layer's next forward waits for that layer's weight alone. CoTrain, fine: the first `resident`
layers, which get their gradient last and are needed first, are updated on the device and never
travel.

Why the laws hold. Every lane has one worker and starts its works in a fixed order, and nothing
slows anything, so the start of a work is the longest chain of works before it, counting both
dependencies and lane order. ZeRO-Offload and coarse list the same works in the same order on every
lane (last layer first on d2h, host and h2d), and the dependencies of coarse are implied by those of
ZeRO-Offload: an update waits for its gradient in both, a forward for its own weight in both. Fewer
chains cannot make the longest one longer, so each work of coarse starts no later, in every step.
That leaves no room for the anomalies of list scheduling, which need a queue whose order changes.
Fine is the best of all prefixes, and the prefix 0 is coarse.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.placement.simulate.engine import LaneSpec, Work

LANES = (LaneSpec("device"), LaneSpec("host"), LaneSpec("d2h"), LaneSpec("h2d"))


@dataclass(frozen=True)
class Layers:
    """Seconds of each layer, first layer first. `down_s` and `up_s` are its copies."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    host_update_s: tuple[float, ...]
    device_update_s: tuple[float, ...]
    down_s: tuple[float, ...]
    up_s: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.forward_s)


def zero_offload(layers: Layers) -> tuple[Work, ...]:
    every_weight = tuple(f"up{i}" for i in range(layers.count))
    forward = [
        Work(f"fwd{i}", "device", layers.forward_s[i], after_previous=every_weight)
        for i in range(layers.count)
    ]
    backward = [Work(f"bwd{i}", "device", layers.backward_s[i]) for i in _backwards(layers)]
    round_trips = [
        work for i in _backwards(layers) for work in _round_trip(layers, i, also_after=("bwd0",))
    ]
    return (*forward, *backward, *round_trips)


def cotrain(layers: Layers, resident: int = 0) -> tuple[Work, ...]:
    """Coarse where no layer is `resident`, fine where the first ones are."""
    forward = [
        Work(
            f"fwd{i}",
            "device",
            layers.forward_s[i],
            after_previous=() if i < resident else (f"up{i}",),
        )
        for i in range(layers.count)
    ]
    rest: list[Work] = []
    for i in _backwards(layers):
        rest.append(Work(f"bwd{i}", "device", layers.backward_s[i]))
        if i < resident:
            rest.append(Work(f"upd{i}", "device", layers.device_update_s[i]))
        else:
            rest.extend(_round_trip(layers, i))
    return (*forward, *rest)


def _round_trip(layers: Layers, i: int, also_after: tuple[str, ...] = ()) -> list[Work]:
    return [
        Work(f"down{i}", "d2h", layers.down_s[i], after=(f"bwd{i}",)),
        Work(f"upd{i}", "host", layers.host_update_s[i], after=(f"down{i}", *also_after)),
        Work(f"up{i}", "h2d", layers.up_s[i], after=(f"upd{i}",)),
    ]


def _backwards(layers: Layers) -> range:
    return range(layers.count - 1, -1, -1)
