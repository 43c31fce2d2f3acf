"""What the seconds of a step go to: together they are its own, each what leaving it out saves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.answer.strategies import answer
from cotrain_compile.cluster.model.profiles import BUCKET_BYTES, per_sample
from cotrain_compile.cluster.steps.spent import spent_s
from cotrain_compile.cluster.steps.stage_step import Does, Rank, Ring, StageStep, StageTask
from cotrain_compile.machine import Network
from tests.support.clusters import a_box, a_device, a_model
from tests.support.examples import examples


def test_what_is_left_out_saves_its_seconds() -> None:
    """Two seconds of computing, then an exchange of three beside one more of computing."""
    ring = Ring(Network(10.0, 0.0), 2)
    tasks = (
        StageTask("first", Does.COMPUTE, 2.0),
        StageTask("sum", Does.SUM, 30.0, ("first",)),
        StageTask("second", Does.COMPUTE, 1.0, ("first",)),
        StageTask("update", Does.COMPUTE, 0.5, ("sum", "second")),
    )
    step = StageStep((Rank(a_device().one, "compute"),), tasks, ring)
    assert step.seconds == pytest.approx(5.5)
    assert spent_s(step) == pytest.approx({"computing": 3.5, "exchanges": 2.0})
    half = spent_s(step, exchanging=0.5)
    assert half == pytest.approx({"computing": 1.75, "exchanges": 3.75})


@examples(8)
@given(rate=st.floats(BUCKET_BYTES / 8, BUCKET_BYTES * 8), samples=st.sampled_from((4, 8)))
def test_all_that_is_spent_is_the_step(rate: float, samples: int) -> None:
    found = answer(a_model([BUCKET_BYTES] * 4, per_sample(30)), a_box(4, rate), samples)
    best = found.best
    assert best
    assert best.step_s
    assert best.spent
    for one in found.strategies:
        if one.step_s is None or one.name == "burst":
            continue
        assert sum(one.spent_s.values()) == pytest.approx(one.step_s)
        assert min(one.spent_s.values()) > 0
        if one is not best and one.step_s > 1.01 * best.step_s and best.spent_s:
            assert " more of " in one.loses
