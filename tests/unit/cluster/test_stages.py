"""Cuts of a chain of layers: exact against brute force, and what the published search misses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from cotrain_compile.cluster.stage_runs import measured_peaks, trimmed_runs
from cotrain_compile.cluster.stages import (
    LayerPeaks,
    PipelineOrder,
    StageProblem,
    Stages,
    cut_by_threshold,
    cut_by_time,
    cut_evenly,
    cut_stages,
    largest_depth,
)
from cotrain_compile.errors import OptionError, PlacementError


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
    published_worse = 0
    for _ in range(1000):
        problem = random_problem(rng)
        count, devices = len(problem.layers.names), len(problem.capacity_bytes)
        cuts = (
            problem.stages((0, *inner, count))
            for inner in itertools.combinations_with_replacement(range(count + 1), devices - 1)
        )
        best = min(problem.loads(stages) for stages in cuts)
        assert problem.loads(cut_stages(problem)) == best
        if len(set(problem.capacity_bytes)) == 1:
            published = problem.loads(cut_by_threshold(problem))[0]
            assert published >= best[0]
            published_worse += published > best[0]
    assert published_worse > 0


def test_the_slowest_stage_takes_least_among_the_cuts_that_fit() -> None:
    rng = random.Random(27)
    refused = 0
    for _ in range(300):
        problem = random_problem(rng)
        count, devices = len(problem.layers.names), len(problem.capacity_bytes)
        seconds = [float(rng.randint(0, 9)) for _ in range(count)]

        def slowest_s(stages: Stages, seconds: Sequence[float] = seconds) -> float:
            return max(sum(seconds[a:b]) for a, b in itertools.pairwise(stages.bounds))

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


def test_filling_each_device_up_leaves_a_dear_layer_to_start_the_next_one() -> None:
    # b fits beside a, but then c begins a stage and takes 9 alone; behind b it takes 3.
    problem = StageProblem(peaks([4, 4, 9], [0, 2, 3]), (10, 10))
    assert cut_by_threshold(problem).peak_bytes == (9, 0)
    assert cut_stages(problem).peak_bytes == (4, 7)
    assert cut_stages(problem).split_points == ("layers.1",)


def test_a_smaller_device_gets_less() -> None:
    problem = StageProblem(peaks([2] * 6, [2] * 6), (8, 4))
    assert cut_stages(problem).peak_bytes == (8, 4)
    assert cut_evenly(problem).peak_bytes == (6, 6)
    with pytest.raises(PlacementError, match="device 1 of 2 would need 6 B and has 4 B") as error:
        problem.require_fit(cut_evenly(problem))
    assert error.value.shortfall_bytes == 2


def test_1f1b_holds_fewer_micro_batches_on_later_devices() -> None:
    layers = peaks([3] * 4, [3] * 4, kept=[1] * 4)
    even = (0, 2, 4)
    gpipe = StageProblem(layers, (100, 100), PipelineOrder.GPIPE, micro_batches=8)
    alternating = StageProblem(layers, (100, 100), PipelineOrder.ONE_F_ONE_B, micro_batches=8)
    assert gpipe.stages(even).peak_bytes == (6 + 7 * 2, 6 + 7 * 2)
    assert alternating.stages(even).peak_bytes == (6 + 1 * 2, 6)


def test_exact_cuts_fit_a_deeper_model_than_even_ones() -> None:
    layers = peaks([8, 3, 8], [0, 2, 6])  # an embedding, a block to repeat, a head
    problem = StageProblem(layers, (13, 13, 13))
    deepest = largest_depth(problem, 1, 2)
    assert problem.fits(cut_stages(StageProblem(layers.repeated(1, 2, deepest), (13,) * 3)))
    assert not problem.fits(cut_stages(StageProblem(layers.repeated(1, 2, deepest + 1), (13,) * 3)))
    assert deepest > largest_depth(problem, 1, 2, cut=cut_evenly) > 0
    assert largest_depth(StageProblem(layers, (7, 7, 7)), 1, 2) == 0


def test_trimmed_runs_measure_every_layer_alone_and_behind_its_neighbour() -> None:
    isolated, added = [5, 4, 6, 7, 4], [0, 3, 2, 5, 1]
    problem = StageProblem(peaks(isolated, added), (1, 1, 1, 1))
    runs = trimmed_runs(5, devices=4)
    assert len(runs) == 5  # 3 + 1 + 1, and 2 L / (G - 2) = 5
    assert all(len(run) <= 2 for run in runs)
    took = {stage: problem.peak_bytes(*stage, 0) for run in runs for stage in run}
    assert measured_peaks(problem.layers.names, took, [0] * 5) == problem.layers
    del took[1, 3]
    with pytest.raises(OptionError, match="layers 1 to 2 were not measured"):
        measured_peaks(problem.layers.names, took, [0] * 5)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match=r"layer layers\.1: added bytes are below zero \(-1\)"):
        peaks([1, 1], [0, -1])
    with pytest.raises(OptionError, match="one of each for every layer"):
        peaks([1, 1], [0])
    with pytest.raises(OptionError, match="devices with memory"):
        StageProblem(peaks([1], [0]), ())
    with pytest.raises(OptionError, match="one capacity"):
        cut_by_threshold(StageProblem(peaks([1], [0]), (4, 8)))
    with pytest.raises(OptionError, match="at least 3 devices"):
        trimmed_runs(5, devices=2)
