"""Policies: the simple rules that choose a placement. Each is a function of the step alone.

`resident` keeps everything on the device. `zero-offload` is the rule of ZeRO-Offload (Ren et al.,
USENIX ATC 2021): parameters and optimizer states at home on the host and every update there, after
the backward; gradients go down, and what the step uses of the new parameters comes up, in the low
precision of autocast or of the parameters: 4 bytes a parameter cross the link.
`coarse` starts each update when its gradient has landed, as CoTrain does (ICPP 2023), with the
parameters at home on the device. `fraction:F`
updates a fixed share on the host and the rest on the device, as Twin-Flow does. `streamed` updates
everything on the device with the states at home on the host. Whether a placement
fits is for `schedule` to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Placement, UpdateMode

# States of at most so many bytes (step counters) are not worth a copy of their own.
SMALL_STATE_BYTES = 1024
# Nor are the smallest tensors that together have at most this part of the bytes of all of them:
# biases and norms, which are most of the tensors of a model.
SMALL_SHARE = 0.01


def resident(dataflow: Dataflow) -> Placement:
    """Everything on the device."""
    return Placement(
        policy="resident",
        homes={b.name: Tier.DEVICE for b in dataflow.buffers if b.role in PERSISTENT_ROLES},
        updates={group.param: UpdateMode.RESIDENT for group in dataflow.updates},
    )


def zero_offload(dataflow: Dataflow) -> Placement:
    """Every update that can run on the host does, with all it owns at home there.

    A parameter with a gradient in its `.grad` stays with it on the device, where that is summed up;
    so does one that the step reads again after its update, as an average of weights does.
    """
    base = _host_updates("zero-offload", dataflow, dataflow.updates)
    stay = dataflow.kept_gradients.keys() | _used_after_updates(dataflow)
    mastered = [param for param in base.updates if param not in stay]
    return replace(
        base,
        homes={**base.homes, **dict.fromkeys(mastered, Tier.HOST)},
        updates={**base.updates, **dict.fromkeys(mastered, UpdateMode.HOST_STREAMED)},
    )


def coarse(dataflow: Dataflow) -> Placement:
    """Every update on the host once its gradient has landed; parameters rest on the device."""
    base = _host_updates("coarse", dataflow, dataflow.updates)
    return replace(base, early_updates=True)


def fraction(dataflow: Dataflow, share: float) -> Placement:
    """About `share` of the bytes of optimizer states is updated on the host, early.

    The parameters whose gradients come first go to the host: they are needed last in the next
    forward, so their updates have the most time.
    """
    sizes = {g.param: sum(dataflow.buffer[s].nbytes for s in g.states) for g in dataflow.updates}
    left = share * sum(sizes.values())
    chosen = []
    for group in sorted(dataflow.updates, key=lambda g: _last_write(dataflow, g.gradient)):
        if sizes[group.param] <= left:
            chosen.append(group)
            left -= sizes[group.param]
    placement = _host_updates(f"fraction:{share:g}", dataflow, tuple(chosen))
    return replace(placement, early_updates=True)


def streamed(dataflow: Dataflow) -> Placement:
    """Every update on the device, with its states at home on the host and fetched for it.

    But for small states, which stay on the device.
    """
    base = resident(dataflow)
    sizes = {s: dataflow.buffer[s].nbytes for group in dataflow.updates for s in group.states}
    small = smallest(sizes)
    moving = {s for s, nbytes in sizes.items() if nbytes > SMALL_STATE_BYTES and s not in small}
    return replace(
        base,
        policy="streamed",
        homes={**base.homes, **dict.fromkeys(moving, Tier.HOST)},
        updates={
            group.param: UpdateMode.RESIDENT
            if moving.isdisjoint(group.states)
            else UpdateMode.STREAMED
            for group in dataflow.updates
        },
        early_updates=True,
    )


def smallest(sizes: Mapping[str, int]) -> frozenset[str]:
    """The smallest that together have at most `SMALL_SHARE` of all bytes; of equals all or none."""
    left = SMALL_SHARE * sum(sizes.values())
    found: set[str] = set()
    for nbytes, alike in groupby(sorted(sizes, key=sizes.__getitem__), key=sizes.__getitem__):
        names = list(alike)
        left -= nbytes * len(names)
        if left < 0:
            break
        found.update(names)
    return frozenset(found)


def rule(name: str) -> Callable[[Dataflow], Placement]:
    """The rule called `name`; `options.Options` has checked that there is one."""
    kind, _, share = name.partition(":")
    return (lambda dataflow: fraction(dataflow, float(share))) if share else RULES[kind]


# The rules that need no parameter, cheapest first: `auto` is never slower than any of them, and
# each is a policy by its name.
RULES: Mapping[str, Callable[[Dataflow], Placement]] = {
    "resident": resident,
    "zero-offload": zero_offload,
    "coarse": coarse,
    "streamed": streamed,
}


def _host_updates(name: str, dataflow: Dataflow, groups: tuple[UpdateGroup, ...]) -> Placement:
    """`groups` are updated on the host with their states at home there, all else stays."""
    states = {state for group in groups for state in group.states}
    hosted = {group.param for group in groups}
    return Placement(
        policy=name,
        homes={
            b.name: Tier.HOST if b.name in states else Tier.DEVICE
            for b in dataflow.buffers
            if b.role in PERSISTENT_ROLES
        },
        updates={
            group.param: UpdateMode.HOST if group.param in hosted else UpdateMode.RESIDENT
            for group in dataflow.updates
        },
    )


def _used_after_updates(dataflow: Dataflow) -> set[str]:
    """Parameters that another op reads or writes behind what their update first writes of them."""
    own = {name for group in dataflow.updates for name in group.ops}
    updated = {group.param for group in dataflow.updates}
    written, found = set[str](), set[str]()
    for op in dataflow.ops:
        if op.name in own:
            written |= updated.intersection(op.writes)
        else:
            found |= written.intersection(op.touched)
    return found


def _last_write(dataflow: Dataflow, buffer: str) -> int:
    return max((i for i, op in enumerate(dataflow.ops) if buffer in op.writes), default=-1)
