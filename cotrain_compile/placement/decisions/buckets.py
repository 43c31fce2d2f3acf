"""Buckets: the step cut into stretches of ops between which little is alive.

In: the device program, seconds and short-lived bytes. Out: the first slot of each bucket. Works on
any graph: a cut is made where the fewest bytes of short-lived values cross, which in a transformer
is between two blocks, in a U-Net between two levels, in a recurrent net between two time steps.
"""

from __future__ import annotations

from collections.abc import Sequence


def cut_points(seconds: Sequence[float], crossing_bytes: Sequence[int], count: int) -> list[int]:
    """First slots of about `count` buckets, the first being 0.

    `crossing_bytes[k]` are alive between slots k - 1 and k. Every bucket takes at least half of an
    equal share of the time, and its end is the cheapest cut before it would take twice that; an op
    that alone takes longer is a bucket of its own.
    """
    if not seconds:
        return [0]
    share_s = sum(seconds) / max(1, count)
    cuts, start = [0], 0
    while True:
        end = _next_cut(seconds, crossing_bytes, start, share_s)
        if end >= len(seconds) or sum(seconds[end:]) < 0.5 * share_s:
            return cuts
        cuts.append(end)
        start = end


def peak_points(seconds: Sequence[float], alive_bytes: Sequence[int], count: int) -> list[int]:
    """First slots of about `count` buckets, each but the first beginning where most is alive.

    The time is divided into equal windows, and each is cut at the op with the most bytes alive.
    """
    window_s = sum(seconds) / max(1, count)
    peaks: dict[int, int] = {}
    elapsed_s = 0.0
    for slot, taken_s in enumerate(seconds):
        window = int(elapsed_s / window_s) if window_s else 0
        if window not in peaks or alive_bytes[slot] > alive_bytes[peaks[window]]:
            peaks[window] = slot
        elapsed_s += taken_s
    return sorted({0, *peaks.values()})


def _next_cut(
    seconds: Sequence[float], crossing_bytes: Sequence[int], start: int, share_s: float
) -> int:
    """The cheapest cut after `start`, len(seconds) when the rest is one bucket."""
    taken_s, best = 0.0, 0
    for slot in range(start, len(seconds)):
        taken_s += seconds[slot]
        if taken_s < 0.5 * share_s:
            continue
        if best and taken_s > 1.5 * share_s:
            return best
        if not best or crossing_bytes[slot + 1] < crossing_bytes[best]:
            best = slot + 1
    return best if best and best < len(seconds) else len(seconds)
