"""Every way to keep a parameter makes a placement that can be carried out, however small it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.machine import Tier
from cotrain_compile.placement.choices import Way, keep
from cotrain_compile.placement.find_choices import choices_of
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.residency import thin_copies
from cotrain_compile.placement.rules import check_placement
from cotrain_compile.plan import UpdateMode
from cotrain_compile.presets import find
from tests.unit.dataflows import mixed_precision_step

WAYS = [
    Way(mode, trips, gradient_away)
    for mode, most_trips in (
        (UpdateMode.RESIDENT, (0,)),
        (UpdateMode.STREAMED, (0, 1, 2)),
        (UpdateMode.HOST, (0,)),
        (UpdateMode.HOST_STREAMED, (1, 2)),
    )
    for trips in most_trips
    for gradient_away in (False, True)
    if not (gradient_away and mode in (UpdateMode.HOST, UpdateMode.HOST_STREAMED))
]


@pytest.mark.parametrize("elements", [8, 1_000_000])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_way_makes_a_placement_that_can_be_carried_out(way: Way, elements: int) -> None:
    dataflow = mixed_precision_step(2, params=elements, batch_bytes=4096)
    group, base = dataflow.updates[0], resident(dataflow)
    kept = keep(dataflow, group.param, thin_copies(dataflow).get(group.param, group.param), way)
    placement = replace(
        base, homes={**base.homes, **kept.homes}, updates={**base.updates, **kept.updates}
    )
    check_placement(dataflow, replace(placement, away=kept.away))
    assert kept.updates[group.param] is way.mode or (elements == 8 and way.trips == 0)


def test_a_parameter_that_is_written_without_an_update_group_is_no_choice() -> None:
    """Two parameters in one storage have no group: what is written to them must not be lost."""
    whole = mixed_precision_step(2, params=1_000, batch_bytes=4096)
    written, *updates = whole.updates
    dataflow = replace(whole, updates=tuple(updates))
    problem = formulate(dataflow, find("h100"), dict.fromkeys(Tier, 1 << 40))
    decided = {name for bundle in choices_of(problem).weights for name in bundle.params}
    assert decided == {group.param for group in updates}
    assert written.param not in decided
