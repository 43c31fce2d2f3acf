"""Buckets: a cut is where little is alive or where most is, on any step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.decisions.bucketed_step import bucketed, cut_points, peak_points
from cotrain_compile.placement.problem import formulate
from cotrain_compile.presets import find
from tests.support.dataflows import chain


@st.composite
def profiles(draw: st.DrawFn) -> tuple[list[float], list[int], int]:
    """Seconds of each slot, bytes between (one more, from before the first), a count."""
    seconds = draw(st.lists(st.integers(0, 100).map(float), min_size=1, max_size=60))
    size = len(seconds) + 1
    crossing = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    return seconds, crossing, draw(st.integers(1, 20))


def test_cuts_lie_between_the_blocks() -> None:
    """Four blocks of five ops; a value is alive inside a block, none between two."""
    seconds = [1.0] * 20
    crossing = [0 if slot % 5 == 0 else 7 for slot in range(21)]
    assert cut_points(seconds, crossing, 4) == [0, 5, 10, 15]


def test_a_cut_goes_out_of_its_way_for_less_to_cross() -> None:
    """An equal share ends after slot 4; up to half a share to either side it is cheaper at 3."""
    crossing = [9] * 11
    crossing[3] = 1
    assert cut_points([1.0] * 10, crossing, 2)[:2] == [0, 3]


def test_a_long_op_is_a_bucket_of_its_own() -> None:
    seconds = [10.0] * 4 + [100.0] + [10.0] * 4
    assert cut_points(seconds, [0] * 10, 6) == [0, 2, 4, 5, 7]


def test_peaks_are_where_most_is_alive() -> None:
    alive = [1, 2, 9, 2, 1, 1, 8, 1, 1, 1]
    assert peak_points([1.0] * 10, alive, 2) == [0, 2, 6]


@given(profiles())
def test_cuts_are_ordered_and_inside_the_step(profile: tuple[list[float], list[int], int]) -> None:
    seconds, crossing, count = profile
    for cuts in (cut_points(seconds, crossing, count), peak_points(seconds, crossing, count)):
        assert cuts[0] == 0
        assert all(a < b for a, b in pairwise([*cuts, len(seconds)]))


@given(profiles())
def test_there_are_at_most_twice_as_many_buckets_as_asked_for(
    profile: tuple[list[float], list[int], int],
) -> None:
    """Each takes at least half a share; the rest of the step may be one more."""
    seconds, crossing, count = profile
    total_s = sum(seconds)
    cuts = cut_points(seconds, crossing, count)
    if total_s:
        assert len(cuts) <= 2 * count + 1
        for start, end in pairwise(cuts):
            assert sum(seconds[start:end]) >= 0.5 * total_s / count - 1e-9
    assert len(peak_points(seconds, crossing, count)) <= count + 2


@given(profiles())
def test_every_window_has_a_cut_at_its_peak(profile: tuple[list[float], list[int], int]) -> None:
    """Nowhere is more alive than at some cut, unless before the first."""
    seconds, alive, count = profile
    cuts = peak_points(seconds, alive, count)
    assert max(alive[cut] for cut in cuts) == max(alive[: len(seconds)])


@pytest.mark.parametrize("points", [cut_points, peak_points])
def test_a_step_without_ops_or_time_is_one_bucket(points: object) -> None:
    assert callable(points)
    assert points([], [0], 4) == [0]
    assert points([0.0, 0.0, 0.0], [0, 1, 0, 0], 1)[0] == 0


def test_at_peaks_a_copy_is_done_before_the_op_at_which_a_bucket_begins() -> None:
    """One that begins after an op is in the bucket of that, which may end with a wait."""
    problem = formulate(chain(4), find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    step = bucketed(problem, 4, at_peaks=True)
    end = step.program.end
    starts = {*step.starts}
    assert 1 < len(starts) < end
    for slot in range(1, end):
        assert step.bucket_before(slot) == step.bucket(slot) - (slot in starts)
    conservative = bucketed(problem, 4, at_peaks=False)
    assert all(conservative.bucket_before(slot) == conservative.bucket(slot) for slot in range(end))
