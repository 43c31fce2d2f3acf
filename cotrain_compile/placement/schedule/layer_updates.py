"""Layer updates: the updates of a layer on the device, as one that runs at one place.

In: the windows in which each may run, and the updates. Out: the same, those of a layer joined where
their windows have a gap in common. Compiled code ends at every task: an update that waits for its
own states is compiled apart from the others, one of a whole layer is as that of the layer beside
it. What it needs is room: all states of the layer at once (`settle` chooses).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotrain_compile.analysis.layers import layer
from cotrain_compile.placement.schedule.moves import DeviceUpdate

Window = tuple[int, int]  # the slot after which an update may run, and that which needs its result


def layer_windows(windows: Mapping[str, Window]) -> dict[str, Window]:
    """The window of each parameter: that of its layer, where there is a gap in which all may run.

    What is in no layer, an embedding or a head, keeps its own.
    """
    members: dict[str, list[str]] = {}
    for param in windows:
        members.setdefault(layer(param) or param, []).append(param)
    found = dict(windows)
    for params in members.values():
        earliest = max(windows[param][0] for param in params)
        limit = min(windows[param][1] for param in params)
        if earliest < limit:
            found |= dict.fromkeys(params, (earliest, limit))
    return found


def joined(updates: Sequence[DeviceUpdate]) -> list[DeviceUpdate]:
    """Those of one layer with one window as one update, in the order of the step."""
    members: dict[tuple[str, int, int], list[DeviceUpdate]] = {}
    for update in updates:
        (param,) = update.params
        members.setdefault((layer(param) or param, update.earliest, update.limit), []).append(
            update
        )
    return [_one(layered) for layered in members.values()]


def _one(updates: Sequence[DeviceUpdate]) -> DeviceUpdate:
    """They run one after the other, so that what each takes inside is there once.

    States come before gradients that were away, as in the fetches of a single update: those are
    fetched when they have left.
    """
    fetches = [fetch for update in updates for fetch in update.fetches]
    return DeviceUpdate(
        params=tuple(param for update in updates for param in update.params),
        ops=tuple(dict.fromkeys(name for update in updates for name in update.ops)),
        earliest=updates[0].earliest,
        limit=updates[0].limit,
        fetches=tuple(sorted(fetches, key=lambda fetch: bool(fetch.after))),
        stores=tuple(name for update in updates for name in update.stores),
        gradient_bytes=sum(update.gradient_bytes for update in updates),
        weight_bytes=sum(update.weight_bytes for update in updates),
        workspace_bytes=max(update.workspace_bytes for update in updates),
        seconds=sum(update.seconds for update in updates),
    )
