"""Width timeline: the step of a chain whose layers have widths, as a timeline of its devices.

In: a `WidthProblem`, the widths, the seconds of the update. Out: a `Timeline` that takes as long as
the plan says: all forwards, all backwards, the sums of gradients as DeepPool counts them, behind
what was computed, and the update. Devices that always work together share a lane. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from cotrain_compile.cluster.profiles import BATCH, Layer
from cotrain_compile.cluster.width_problem import WidthProblem
from cotrain_compile.plan import Span, Timeline

NETWORK = "network"
_Part = tuple[tuple[str, ...], str, float]  # lanes, what is done there, seconds


def width_timeline(
    problem: WidthProblem, widths: Mapping[str, int], update_s: float
) -> Timeline | None:
    """One part after the other; None where layers have branches, which may run beside."""
    if not problem.profile.is_chain:
        return None
    lanes = device_lanes(widths)
    everywhere = tuple(lanes.values())
    layers = problem.profile.layers
    forth = [part for layer in layers for part in _turn(problem, layer, widths, lanes, "forward")]
    back = [
        part
        for layer in reversed(layers)
        for part in _turn(problem, layer, widths, lanes, "backward")
    ]
    sums = [
        ((NETWORK,), f"sum of {layer.name}", problem.sync_s(layer, widths[layer.name]))
        for layer in layers
    ]
    spans, now_s = [], 0.0
    for on, name, seconds in (*forth, *back, *sums, (everywhere, "update", update_s)):
        if seconds:
            spans += [Span(lane, name, now_s, now_s + seconds) for lane in on]
            now_s += seconds
    return Timeline("predicted", tuple(spans), {})


def device_lanes(widths: Mapping[str, int]) -> dict[int, str]:
    """Lanes by the width from which on their devices work: `devices 4 to 7` from 8 on."""
    edges = (0, *sorted(set(widths.values())))
    return {
        end: f"device {first}" if end - first == 1 else f"devices {first} to {end - 1}"
        for first, end in pairwise(edges)
    }


def _turn(
    problem: WidthProblem,
    layer: Layer,
    widths: Mapping[str, int],
    lanes: Mapping[int, str],
    kind: str,
) -> Iterator[_Part]:
    """A layer's forward after what comes to it, or its backward before that goes back."""
    width = widths[layer.name]
    share = problem.batch / width
    seconds = (layer.forward_s if kind == "forward" else layer.backward_s).at(share)
    on = tuple(lane for end, lane in lanes.items() if end <= width)
    turn = (on, f"{kind} of {layer.name}", seconds)
    sent = [
        ((NETWORK,), f"to {layer.name}, {kind}", _sent_s(problem, layer, widths, read.source))
        for read in layer.reads
        if read.source != BATCH
    ]
    yield from (*sent, turn) if kind == "forward" else (turn, *sent)


def _sent_s(problem: WidthProblem, layer: Layer, widths: Mapping[str, int], source: str) -> float:
    """One way; the problem counts both."""
    nbytes = next(read.nbytes for read in layer.reads if read.source == source)
    both_s = problem.transfer_s(nbytes.at(problem.batch), widths[source], widths[layer.name])
    return both_s / 2
