"""Every strategy for a parameter makes a placement that can be carried out, however small it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.check.rules import check_placement
from cotrain_compile.placement.decisions.activation_strategies import (
    ACTIVATION_STRATEGIES,
    MadeAgain,
)
from cotrain_compile.placement.decisions.clusters import ActivationCluster, Again
from cotrain_compile.placement.decisions.effects import Flow
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.decisions.strategies import PARAM_STRATEGIES, Strategy
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.presets import find
from tests.support.dataflows import mixed_precision_step
from tests.support.nets import every_small_step


@pytest.mark.parametrize("elements", [8, 1_000_000])
@pytest.mark.parametrize("strategy", [s for s in PARAM_STRATEGIES if s.mode is not None], ids=str)
def test_a_strategy_makes_a_placement_that_can_be_carried_out(
    strategy: Strategy, elements: int
) -> None:
    dataflow = mixed_precision_step(2, params=elements, batch_bytes=4096)
    group, base = dataflow.updates[0], resident(dataflow)
    fetched = low_precision_copies(dataflow).get(group.param, group.param)
    kept = strategy.placed(dataflow, group.param, fetched)
    placement = replace(
        base, homes={**base.homes, **kept.homes}, updates={**base.updates, **kept.updates}
    )
    check_placement(dataflow, replace(placement, offloaded=kept.offloaded))
    assert kept.updates[group.param] is strategy.mode or (elements == 8 and strategy.fetches == 0)


def test_a_parameter_that_is_written_without_an_update_group_is_no_choice() -> None:
    """Two parameters in one storage have no group: what is written to them must not be lost."""
    whole = mixed_precision_step(2, params=1_000, batch_bytes=4096)
    written, *updates = whole.updates
    dataflow = replace(whole, updates=tuple(updates))
    problem = formulate(dataflow, find("h100"), dict.fromkeys(MEMORIES, 1 << 40))
    decided = {name for d in decision_space(problem).params for name in d.cluster.params}
    assert decided == {group.param for group in updates}
    assert written.param not in decided


def test_copies_that_change_memory_say_so_everywhere() -> None:
    """A flow that begins or ends a hold is in a hold always: so its totals are memory."""
    ends, moved = set[Flow](), set[Flow]()
    for _, dataflow in every_small_step():
        problem = formulate(dataflow, find("h100"), dict.fromkeys(MEMORIES, 1 << 40))
        for effect in chain.from_iterable(decision_space(problem).effects):
            moved |= {demand.flow for demand in effect.moved}
            ends |= {d.flow for hold in effect.holds for d in (hold.begins, hold.ends) if d}
            assert effect.update is not None or not effect.freed_bytes
    assert {Flow.OFFLOAD, Flow.RELOAD, Flow.GRADIENT, Flow.FETCH, Flow.REFETCH} == ends
    assert ends.isdisjoint(moved)


@pytest.mark.parametrize("by", [3, 4, 12, 60])
def test_a_value_is_made_again_in_any_bucket_until_it_is_needed(by: int) -> None:
    """Each is in the window of one choice, which misses the value up to its end and no longer.

    What runs before the op at which a bucket begins is in the time of the bucket before.
    """
    again = Again(1.0, first=3, last=by - 1, by=by, source=2)
    cluster = ActivationCluster(
        ("value",), 8, leaves=2, returns=by, made=2, movable=False, again=again
    )
    made: list[int] = []
    for option in ACTIVATION_STRATEGIES:
        if isinstance(option, MadeAgain) and option.fits(cluster):
            (work,), (missing,) = option.effect(cluster).device_work, option.effect(cluster).holds
            assert work.earliest is not None
            made += range(work.earliest + 1, work.bucket + 1)
            assert (missing.first, missing.last) == (3, min(work.bucket, by - 1))
    assert len(made) == len(set(made))
    assert set(range(3, by + 1)) <= set(made)
