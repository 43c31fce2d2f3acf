"""Bounds: seconds that no cut of a chain of layers passes under, before one is made. No torch."""

from __future__ import annotations

from typing import NamedTuple

from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.steps.stage_step import ROUNDING


class PassSeconds(NamedTuple):
    """Seconds of a micro-batch through all layers and back, and at least through the longest one;
    in the last stage layers take `last` times as long at least."""

    all_s: float
    longest_s: float
    last: float = 1.0


class OnceSeconds(NamedTuple):
    """A micro-batch once through all layers and back: as what layers make is kept, and where they
    run again."""

    kept: PassSeconds
    again: PassSeconds


def once_s(profile: LayerProfile, samples: int) -> OnceSeconds:
    """For a micro-batch of so many samples."""
    both_s = [layer.compute_s(samples) for layer in profile.layers]
    forward_s = [layer.forward_s.at(samples) for layer in profile.layers]
    again_s = [both + forward for both, forward in zip(both_s, forward_s, strict=True)]
    pairs = zip(both_s, again_s, strict=True)
    last = min((both / again for both, again in pairs if again), default=1.0)
    return OnceSeconds(
        PassSeconds(sum(both_s), max(both_s)), PassSeconds(sum(again_s), max(both_s), last)
    )


def least_of(once: PassSeconds, micro_batches: int, stages: int) -> float:
    """What no cut of layers that take so long in so many stages passes under.

    Stage k begins when a micro-batch has passed those before it, and computes all m of its own, so
    that T >= b_0 + ... + b_(k-1) + m b_k for every k, with r b_k in place of b_k for the last one.
    Those before it are T (1 - (1 - 1/m)^(p-1)) together at most, and the last one is what they
    leave of T, by m r: of all b, a sum that is largest where they are as long as that, or nothing.
    And a stage has the longest layer for every micro-batch.
    """
    m, in_last = micro_batches, micro_batches * once.last
    before = 1 - (1 - 1 / m) ** (stages - 1)
    most = max(before + (1 - before) / in_last, 1 / in_last)
    return max(once.all_s / most, m * once.longest_s) * ROUNDING
