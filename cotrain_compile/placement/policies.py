"""Policies: the simple rules that choose a placement. Each is a function of the step alone.

`resident` keeps everything on the device. `zero-offload` is the rule of ZeRO-Offload (Ren et al.,
USENIX ATC 2021): optimizer states at home on the host and every update there. Whether a placement
fits is for `schedule` to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Placement, UpdateMode


def resident(dataflow: Dataflow) -> Placement:
    """Everything on the device."""
    return Placement(
        policy="resident",
        homes={b.name: Tier.DEVICE for b in dataflow.buffers if b.role in PERSISTENT_ROLES},
        updates={group.param: UpdateMode.RESIDENT for group in dataflow.updates},
    )


def zero_offload(dataflow: Dataflow) -> Placement:
    """Every update that can run on the host does, with its states at home there."""
    states = {state for group in dataflow.updates for state in group.states}
    return Placement(
        policy="zero-offload",
        homes={
            b.name: Tier.HOST if b.name in states else Tier.DEVICE
            for b in dataflow.buffers
            if b.role in PERSISTENT_ROLES
        },
        updates={group.param: UpdateMode.HOST for group in dataflow.updates},
    )


RULES: Mapping[str, Callable[[Dataflow], Placement]] = {
    "resident": resident,
    "zero-offload": zero_offload,
}
