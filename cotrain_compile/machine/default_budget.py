"""Default budget: what a step may take of a device's memory where nobody says. Bytes in, bytes out.

A card at hand tells what is free of it. For one that is not, it is what such a card has while
nothing but this process uses it, so that a plan made elsewhere fits there. No torch.
"""

from __future__ import annotations

from cotrain_compile.machine import Machine

# Of the card's memory, for what no plan counts: libraries' workspaces and kernels, and pieces
# between tensors that are too small to use.
RESERVE_FRACTION = 0.05
RESERVE_LEAST_BYTES = 2**29
# What the driver takes for a process that uses a card, its CUDA context: published figures are 0.3
# to 0.6 GiB. Beside a card it is no longer free.
CONTEXT_BYTES = 600 << 20


def of_what_is_free(ours_bytes: int, total_bytes: int) -> int:
    """Of what a step may have of a card with `total_bytes`, what it is planned for by default."""
    return ours_bytes - max(RESERVE_LEAST_BYTES, int(RESERVE_FRACTION * total_bytes))


def of_machine(machine: Machine) -> int:
    """What a step is planned for on the device of `machine`, which is not at hand or emulated.

    An emulated device has no context and no libraries. Of one smaller than any card it is half.
    """
    total_bytes = machine.device.capacity_bytes
    if not machine.runs_ahead:
        return total_bytes
    return max(-(-total_bytes // 2), of_what_is_free(total_bytes - CONTEXT_BYTES, total_bytes))
