"""Races in steps of a few events, one for each thing that orders two of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis.races import StepEvent, find_race
from cotrain_compile.plan import Lane

WEIGHT = {"w"}
DEVICE, HOST, D2H, H2D, *_ = Lane


def device(name: str, *, reads: str = "", writes: str = "") -> StepEvent:
    return StepEvent(name, Lane.DEVICE, tuple(reads.split()), tuple(writes.split()))


MAKE = device("mm", writes="g")
OFFLOAD = StepEvent("offload.g", D2H, ("g",), ("g_host",))
FREE = device("free", writes="g")
UPDATE = StepEvent("update.w", HOST, ("g_host",), ("w",), after=("offload.g",))
BACK = StepEvent("back.w", H2D, ("w",), ("w_device",), after=("update.w",))
READ = device("mm_1", reads="w_device")


def wait(*tasks: str) -> StepEvent:
    return StepEvent("wait", DEVICE, after=tasks)


def wait_previous(*tasks: str) -> StepEvent:
    return StepEvent("wait_previous", DEVICE, after_previous=tasks)


SOUND = (MAKE, OFFLOAD, wait("offload.g"), FREE, UPDATE, BACK, wait("back.w"), READ)


def test_a_sound_step_has_no_race() -> None:
    assert find_race(SOUND, WEIGHT) is None


def without(edge: str, event: StepEvent) -> StepEvent:
    return replace(event, after=tuple(name for name in event.after if name != edge))


@pytest.mark.parametrize(
    ("event", "edge", "said"),
    [
        (UPDATE, "offload.g", None),  # the device has waited for it by then
        (BACK, "update.w", "update.w and back.w, which use w "),
        (wait("back.w"), "back.w", "back.w and mm_1, which use w_device "),
        (wait("offload.g"), "offload.g", "offload.g and free, which use g "),
    ],
)
def test_an_edge_that_matters_is_missed(event: StepEvent, edge: str, said: str | None) -> None:
    broken = [without(edge, other) if other == event else other for other in SOUND]
    race = find_race(broken, WEIGHT)
    assert (race is None) if said is None else (race is not None and said in str(race))


def test_the_device_waits_for_what_comes_before_a_task_it_waits_for() -> None:
    events = (MAKE, OFFLOAD, UPDATE, wait("update.w"), FREE)
    assert find_race(events, WEIGHT) is None


def test_copies_of_one_direction_are_in_order_and_updates_are_not() -> None:
    first, second = StepEvent("a", H2D, (), ("x",)), StepEvent("b", H2D, (), ("x",))
    assert find_race([first, second, wait("b")], {"x"}) is None
    on_host = [replace(first, lane=HOST), replace(second, lane=HOST), wait("b")]
    assert find_race(on_host, {"x"}) is not None


def test_a_task_that_comes_after_one_not_yet_issued() -> None:
    race = find_race([UPDATE, OFFLOAD], WEIGHT)
    assert str(race) == "nothing orders offload.g and update.w: the first has not been issued yet"


ENDS = device("the end of the step", writes="w")
DEFERRED = StepEvent("update.w", HOST, (), ("w",))


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_left_to_the_next_step_must_be_waited_for_there(waits: bool) -> None:
    end = replace(ENDS, ends_step=True)
    uses = device("mm", reads="w")
    begin = [wait_previous("update.w"), uses] if waits else [uses, wait_previous("update.w")]
    race = find_race([*begin, DEFERRED, end], WEIGHT)
    if waits:
        assert race is None
    else:
        assert race is not None
        assert race.first == "update.w of the step before"
        assert race.second == "mm"


def test_what_nobody_waits_for_is_in_flight_when_the_step_ends() -> None:
    race = find_race([DEFERRED, replace(ENDS, ends_step=True)], WEIGHT)
    assert race is not None
    assert race.second == "the end of the step"


def test_memory_made_in_a_step_is_new_in_the_next() -> None:
    sent = (MAKE, OFFLOAD, wait("offload.g"), FREE)
    late = StepEvent("update.w", HOST, ("g_host",), ("w",))
    end = replace(ENDS, ends_step=True)
    events = (wait_previous("update.w"), *sent, late, end)
    assert find_race(events, WEIGHT) is None
    assert find_race(events, {"w", "g_host"}) is None  # the wait orders that, too
    assert find_race((*sent, wait_previous("update.w"), late, end), WEIGHT) is None
    assert find_race((*sent, wait_previous("update.w"), late, end), {"w", "g_host"}) is not None
