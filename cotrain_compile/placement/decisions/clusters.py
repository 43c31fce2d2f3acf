"""Clusters: parameters, or activations, that are alike in every bucket and decided on together.

Types alone: `find_clusters` makes them. They say when and how large something is, and nothing about
what may be done with it: that is for `strategies`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptGradients:
    """What lies in the `.grad` of the parameters of a cluster, before the step or after it.

    It rests where the parameter does. Buckets: `made` of its making, 0 where the step finds it;
    `fetched` of each use that it is fetched for where it rests on the host, `written` of its last
    write, None where there is none; `for_update` is the last one where only the update reads it.
    """

    nbytes: int = 0
    made: int = 0
    fetched: tuple[int, ...] = ()
    written: int | None = None
    for_update: int | None = None


NO_GRADIENTS = KeptGradients()


@dataclass(frozen=True)
class ParamCluster:
    """Parameters that are decided on together; bytes and seconds are sums over them.

    `fetched_bytes` cross the link when the weight is fetched: the low-precision copies where the
    step uses nothing else, none where it uses nothing at all, both `param_unused`, else the
    parameters.
    `largest` is the share that the largest parameter has in the cluster, `least_largest` the least
    share that the largest of any part of the cluster has in that part; `largest_piece` and
    `least_piece` are the same of the pieces in which streamed updates go. The values made inside
    the largest update take `made_bytes`, `workspace_bytes` beyond its gradient, those inside a
    piece `piece_workspace_bytes`. `cast_s` is what the host takes to make the low-precision copies,
    `device_cast_s` what the device takes where it makes them. The rest are buckets: of the first
    use of the weight, the last in the forward, the first in the backward and the last, of the
    gradient's making, its last use, and the release of the update. `kept` lies in `.grad`. Frozen
    ones are not `updated`. At home on the host, the weight can be fetched up to `most_fetches`
    times in a step; where the `gradient_waits` there are buckets between its last use and the
    update. On guesses the update may begin after bucket `guessed`, None where there is nothing to
    guess or nothing gained; to save its `second_bytes` takes `saving_s`. Of the states `disk_bytes`
    may rest on disk, of the parameters `disk_param_bytes`, of what lies in their `.grad`
    `disk_kept_bytes`, none where nothing may. One that `rests` stays on the device.
    """

    params: tuple[str, ...]
    updated: bool
    most_fetches: int
    gradient_waits: bool
    param_bytes: int
    state_bytes: int
    small_state_bytes: int
    gradient_bytes: int
    fetched_bytes: int
    param_unused: bool
    largest: float
    least_largest: float
    largest_piece: float
    least_piece: float
    workspace_bytes: int
    piece_workspace_bytes: int
    made_bytes: int
    device_s: float
    host_s: float
    cast_s: float
    device_cast_s: float
    first: int
    leaves: int
    returns: int
    last: int
    gradient_made: int
    gradient_used: int
    release: int
    kept: KeptGradients = NO_GRADIENTS
    guessed: int | None = None
    second_bytes: int = 0
    saving_s: float = 0.0
    disk_bytes: int = 0
    disk_param_bytes: int = 0
    disk_kept_bytes: int = 0
    rests: bool = False


@dataclass(frozen=True)
class Again:
    """The least that it takes to make activations again: `seconds` of the device.

    They are missing in buckets `first` to `last`; the work is done by the end of bucket `by`, with
    `network_s` of the network where they are parameters gathered again. What they are made of can
    be on its way from bucket `source` on, in place of what they are.
    """

    seconds: float
    first: int
    last: int
    by: int
    source: int
    network_s: float = 0.0


@dataclass(frozen=True)
class RegionLevel:
    """From which `level` on a region, by its index, makes a value again."""

    region: int
    level: int


@dataclass(frozen=True)
class ActivationCluster:
    """Temporaries that may be gone from bucket `leaves` (last use) to `returns` (next use).

    A copy may begin behind bucket `made`, in which they are written last before that. Where they
    are not `movable` there is nothing in between. With `sent` they have been offloaded before that,
    so that they are on the host already. `again` says what it takes to make them again, None where
    that is not to be decided here; `from_level` where a decision about the levels of regions makes
    them again, so that they are not offloaded as well. `slots` are those of the uses before and
    behind, where all have the same and single ops count. What is offloaded may be on disk where it
    `may_rest_on_disk`.
    """

    buffers: tuple[str, ...]
    nbytes: int
    leaves: int
    returns: int
    made: int
    movable: bool = True
    sent: bool = False
    again: Again | None = None
    from_level: RegionLevel | None = None
    slots: tuple[int, int] | None = None
    may_rest_on_disk: bool = False
