"""Width problem: a model, a batch, some devices, and what a layer or a transfer takes on them.

The formulas of DeepPool (Park et al., MLSys 2022) for a layer i on g devices:

    sync(i, g)     = gradient bytes / rate, 0 for one device
    transfer(p, g) = 2 (max(sent, received by any device) / rate + latency), 0 for p = g

What a device has under both widths is not sent. Devices beside have nothing yet. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.cluster.model.profiles import BATCH, Layer, LayerProfile
from cotrain_compile.cluster.widths.branches import Item, sequence_of
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Network

# Ops that work on each number by itself, by how their names begin.
POINTWISE = ("relu", "gelu", "silu", "tanh", "sigmoid", "dropout", "identity", "flatten")


@dataclass(frozen=True)
class WidthProblem:
    """`batch` samples a step, on up to `devices` devices joined by `network`."""

    profile: LayerProfile
    network: Network
    batch: int
    devices: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.devices < 1:
            raise OptionError(
                f"a step has samples and devices, not {self.batch} and {self.devices}"
            )

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Powers of two that are no more than the devices and share the batch evenly."""
        powers = (1 << i for i in range(self.devices.bit_length()))
        return tuple(w for w in powers if w <= self.devices and self.batch % w == 0)

    @cached_property
    def items(self) -> tuple[Item, ...]:
        return sequence_of(self.profile)

    def layer_s(self, layer: Layer, width: int) -> float:
        """Forward, backward and sum of gradients of a layer on so many devices."""
        return layer.compute_s(self.batch / width) + self.sync_s(layer, width)

    def sync_s(self, layer: Layer, width: int) -> float:
        """The sum of a layer's gradients over its devices."""
        return layer.grad_bytes / self.network.bytes_per_s if width > 1 else 0.0

    def transfer_s(self, nbytes: float, before: int, after: int, *, beside: bool = False) -> float:
        """Forward and backward of `nbytes` (of the whole batch) from one width to another.

        `beside`: to or from devices of their own, where nothing is there already.
        """
        if before == after and not beside:
            return 0.0
        held, wanted = 1 / before, 1 / after
        sent = held if beside or before > after else held - wanted
        received = wanted if beside or after > before else wanted - held
        return 2 * (
            max(sent, received) * nbytes / self.network.bytes_per_s + self.network.latency_s
        )


def is_pinned(item: Item) -> bool:
    """Whether it must have the width of the one layer that it reads."""
    read_from = item.layer.reads[0].source
    return (
        item.branches == ((),)
        and read_from != BATCH
        and item.layer.op.lower().startswith(POINTWISE)
    )
