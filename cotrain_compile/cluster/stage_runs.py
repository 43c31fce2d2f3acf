"""Stage runs: which short runs on real devices measure the peaks that stages are cut by.

In: the layers and the number of devices. Out: runs, each of a few stages of one or two layers; and
from what these took, `LayerPeaks`. Peaks from a trace need no run: this calibrates them.

CAPSlog's trimmed runs (PDP 2024): the first and the last device hold the ends of the model, which
are cut down to what makes it run, and each device between them one stage that is whole. One sweep
over single layers gives what is needed alone; two over pairs, which begin at even and at odd
layers, give what each layer adds. Together about 2 L / (G - 2) runs for L layers and G devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotrain_compile.cluster.stages import LayerPeaks
from cotrain_compile.errors import OptionError

Stretch = tuple[int, int]
"""The first layer of a stage, and the one after its last."""


def trimmed_runs(layers: int, devices: int) -> tuple[tuple[Stretch, ...], ...]:
    """The stages to measure in each run, at most one for each device but the first and the last.

    Raises:
        OptionError: fewer than three devices.
    """
    if devices < 3:
        raise OptionError(f"trimmed runs need at least 3 devices, not {devices}")
    sweeps = (
        [(i, i + 1) for i in range(layers)],
        [(i, i + 2) for i in range(0, layers - 1, 2)],
        [(i, i + 2) for i in range(1, layers - 1, 2)],
    )
    whole = devices - 2
    return tuple(
        tuple(sweep[i : i + whole]) for sweep in sweeps for i in range(0, len(sweep), whole)
    )


def measured_peaks(
    names: Sequence[str], peak_bytes: Mapping[Stretch, int], kept_bytes: Sequence[int]
) -> LayerPeaks:
    """What the layers take, from the peaks of all stages of `trimmed_runs`.

    Where a pair takes less than its first layer alone, the second one adds nothing.

    Raises:
        OptionError: a stage was not measured.
    """
    try:
        alone = tuple(peak_bytes[i, i + 1] for i in range(len(names)))
        grown = [max(0, peak_bytes[i - 1, i + 1] - alone[i - 1]) for i in range(1, len(names))]
    except KeyError as error:
        first, last = error.args[0]
        raise OptionError(
            f"layers {first} to {last - 1} were not measured as one stage; run all trimmed runs"
        ) from None
    return LayerPeaks(tuple(names), alone, (0, *grown), tuple(kept_bytes))
