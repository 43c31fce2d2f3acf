"""Cuts of a chain of layers: exact against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from cotrain_compile.cluster.pipeline.cuts import (
    LayerPeaks,
    PipelineOrder,
    StageProblem,
    Stages,
    cut_by_time,
    cut_stages,
)
from cotrain_compile.errors import OptionError


def peaks(
    isolated: Sequence[int],
    added: Sequence[int],
    kept: Sequence[int] = (),
    working: Sequence[int] = (),
) -> LayerPeaks:
    names = tuple(f"layers.{i}" for i in range(len(isolated)))
    kept = tuple(kept) or (0,) * len(isolated)
    return LayerPeaks(names, tuple(isolated), tuple(added), kept, tuple(working))


def random_problem(rng: random.Random) -> StageProblem:
    count, devices = rng.randint(1, 7), rng.randint(1, 4)
    alike = rng.random() < 0.5
    return StageProblem(
        peaks(*([rng.randint(0, 12) for _ in range(count)] for _ in range(rng.choice((3, 4))))),
        (24,) * devices if alike else tuple(rng.randint(8, 24) for _ in range(devices)),
        rng.choice(list(PipelineOrder)),
        rng.randint(1, 5),
    )


def test_the_cut_is_the_best_of_all_by_its_largest_load_and_those_after_it() -> None:
    rng = random.Random(27)
    for _ in range(1000):
        problem = random_problem(rng)
        count, devices = len(problem.layers.names), len(problem.capacity_bytes)
        cuts = (
            problem.stages((0, *inner, count))
            for inner in itertools.combinations_with_replacement(range(count + 1), devices - 1)
        )
        best = min(problem.loads(stages) for stages in cuts)
        assert problem.loads(cut_stages(problem)) == best


def test_the_slowest_stage_takes_least_among_the_cuts_that_fit() -> None:
    rng = random.Random(27)
    refused = 0
    for _ in range(300):
        problem = random_problem(rng)
        count, devices = len(problem.layers.names), len(problem.capacity_bytes)
        seconds = [[float(rng.randint(0, 9)) for _ in range(count)] for _ in range(devices)]

        def slowest_s(stages: Stages, seconds: Sequence[Sequence[float]] = seconds) -> float:
            spans = zip(seconds, itertools.pairwise(stages.bounds), strict=True)
            return max(sum(own[a:b]) for own, (a, b) in spans)

        cuts = [
            problem.stages((0, *inner, count))
            for inner in itertools.combinations_with_replacement(range(count + 1), devices - 1)
        ]
        fitting = [slowest_s(stages) for stages in cuts if problem.fits(stages)]
        found = cut_by_time(problem, seconds)
        assert (found is None) == (not fitting)
        refused += found is None
        if found:
            assert problem.fits(found)
            assert slowest_s(found) == min(fitting)
    assert 0 < refused < 300


def test_a_smaller_device_gets_less() -> None:
    problem = StageProblem(peaks([2] * 6, [2] * 6), (8, 4))
    assert cut_stages(problem).peak_bytes == (8, 4)
    assert not problem.fits(problem.stages((0, 3, 6)))


def test_1f1b_holds_fewer_micro_batches_on_later_devices() -> None:
    layers = peaks([3] * 4, [3] * 4, kept=[1] * 4)
    even = (0, 2, 4)
    gpipe = StageProblem(layers, (100, 100), PipelineOrder.GPIPE, micro_batches=8)
    alternating = StageProblem(layers, (100, 100), PipelineOrder.ONE_F_ONE_B, micro_batches=8)
    assert gpipe.stages(even).peak_bytes == (6 + 7 * 2, 6 + 7 * 2)
    assert alternating.stages(even).peak_bytes == (6 + 1 * 2, 6)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match=r"layer layers\.1: added bytes are below zero \(-1\)"):
        peaks([1, 1], [0, -1])
    with pytest.raises(OptionError, match="one of each for every layer"):
        peaks([1, 1], [0])
    with pytest.raises(OptionError, match="devices with memory"):
        StageProblem(peaks([1], [0]), ())
