"""Stage steps: each task takes what its rank's machine says, and kinds of devices wait for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.steps.fastest import fastest, fastest_option
from cotrain_compile.cluster.steps.stage_step import (
    Does,
    Rank,
    Ring,
    StageStep,
    StageTask,
)
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import HostUpdate, Link, Network
from cotrain_compile.placement.simulate.engine import LaneSpec, lower_bound, simulate
from tests.support.clusters import HOST, a_machine
from tests.support.examples import examples

# Copies take 2 s and a byte in 0.1; the host's memory has 30 bytes a second, updates half of 10.
MACHINE = a_machine(
    network=Network(5.0, 1.0), host=replace(HOST, bytes_per_s=30.0), update=HostUpdate(10.0, 1, 2.0)
).but(h2d=Link(10.0, 2.0), d2h=Link(10.0, 2.0))


@pytest.mark.parametrize(
    ("does", "seconds"),
    [
        (Does.COMPUTE, 3 * 20),  # as many times slower as the profile says of its kind
        (Does.UPDATE, 20 / MACHINE.device.bytes_per_s),
        (Does.FETCH, 2 + 2),
        (Does.STORE, 2 + 2),
        (Does.ADD, 3 * 20 / 30),
        (Does.HOST_UPDATE, 20 / 5),
        (Does.SEND, 1 + 4),
    ],
)
def test_a_task_takes_what_the_machine_of_its_rank_says(does: Does, seconds: float) -> None:
    rank = Rank(MACHINE, "device0", slowness=3.0)
    assert rank.seconds(does, 20) == pytest.approx(seconds)
    assert rank.seconds(does, 0) == 0.0


def test_an_exchange_takes_a_round_for_each_rank_but_one_and_a_sum_twice_as_many() -> None:
    ring = Ring(Network(5.0, 1.0), 4)
    assert ring.seconds(Does.GATHER, 20) == ring.seconds(Does.SCATTER, 20) == 3 * (1 + 1)
    assert ring.seconds(Does.SUM, 20) == 6 * (1 + 1)
    assert ring.sent_bytes(Does.SUM, 20) == 30
    assert replace(ring, sum_s=lambda nbytes: nbytes).seconds(Does.SUM, 20) == 20


def test_every_kind_does_what_all_do_and_an_exchange_waits_for_the_slowest() -> None:
    kinds = (Rank(MACHINE, "fast", said=" on fast"), Rank(MACHINE, "slow", 2.0, " on slow"))
    tasks = (
        StageTask("forward", Does.COMPUTE, 5.0),
        StageTask("kept", Does.STORE, 20, ["forward"]),
        StageTask("sum", Does.SUM, 20, ["forward"]),
        StageTask("rest", Does.COMPUTE, 1.0, ["sum"], rank=0),
    )
    step = StageStep(kinds, tasks, Ring(Network(5.0, 1.0), 2))
    ends = {span.name: span.end_s for span in step.timeline.spans}
    assert (ends["forward on fast"], ends["forward on slow"]) == (5, 10)
    assert (ends["kept on fast"], ends["kept on slow"]) == (14, 14)  # what all wait for is of all
    assert (ends["sum"], ends["rest on fast"]) == (10 + 2 * 3, 17)
    assert step.seconds == step.bound_s == 17
    assert step.busiest == ("slow", 10)
    moved = {does: nbytes for does, nbytes in step.moved_bytes.items() if nbytes}
    assert moved == {Does.STORE: 20, Does.SUM: 20}


@dataclass(frozen=True)
class _Choice:
    least_s: float
    took_s: float | None
    closer_s: float = 0.0

    @property
    def step(self) -> StageStep:
        assert self.took_s is not None, "it is ruled out by what it takes at least"
        task = StageTask("all", Does.COMPUTE, self.took_s)
        return StageStep((Rank(MACHINE, "device0"),), (task,))


def test_what_a_bound_rules_out_is_not_simulated() -> None:
    choices = [_Choice(4.0, None), _Choice(2.0, 4.0), _Choice(1.0, 5.0), _Choice(3.0, 4.0)]
    assert fastest(choices) is choices[1]
    assert fastest(list[_Choice]()) is None


def test_tasks_that_wait_for_each_other_or_share_a_name_are_refused() -> None:
    def step(*tasks: StageTask) -> StageStep:
        return StageStep((Rank(MACHINE, "device0"),), tasks)

    for circle in (
        (StageTask("a", Does.COMPUTE, 1.0, ["b"]), StageTask("b", Does.COMPUTE, 1.0)),
        (StageTask("a", Does.COMPUTE, 1.0, ["nothing"]),),
    ):
        with pytest.raises(PlanError, match="can never start, the first on their lanes are a"):
            _ = step(*circle).seconds
    with pytest.raises(PlanError, match="two tasks are named a"):
        _ = step(StageTask("a", Does.COMPUTE, 1.0), StageTask("a", Does.FETCH, 1.0)).seconds


@examples(40)
@given(data=st.data())
def test_a_step_takes_what_the_simulator_says(data: st.DataObject) -> None:
    """Random tasks on two kinds of ranks, each after some that are listed before."""
    kinds = (Rank(MACHINE, "fast", said=" on fast"), Rank(MACHINE, "slow", 2.0, " on slow"))
    does = st.sampled_from((Does.COMPUTE, Does.FETCH, Does.STORE, Does.HOST_UPDATE, Does.SUM))
    tasks: list[StageTask] = []
    for number in range(data.draw(st.integers(1, 9))):
        names = [task.name for task in tasks]
        after = data.draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        kind, amount = data.draw(does), data.draw(st.integers(0, 20))
        tasks.append(StageTask(f"task {number}", kind, amount, after))
    step = StageStep(kinds, tuple(tasks), Ring(Network(5.0, 1.0), 2))
    lanes = [LaneSpec(lane) for lane in step.lanes_s]
    assert step.seconds == simulate(step.works, lanes).makespan_s
    assert step.bound_s == pytest.approx(lower_bound(step.works, lanes))


def test_of_options_the_least_bound_is_planned_first_and_plans_by_theirs() -> None:
    """What is ruled out is not simulated, also where its option had to be planned."""
    options = [
        _Option(1.0, [_Choice(9.0, None), _Choice(3.0, 5.0)]),
        _Option(2.0, [_Choice(2.5, 4.0), _Choice(4.5, None), _Choice(3.5, None, closer_s=4.2)]),
        _Option(6.0, [_Choice(6.0, None)]),
    ]
    found = fastest_option(options)
    assert found is not None
    assert (found[0], found[1]) == (1, options[1].made[0])
    assert fastest_option(list[_Option]()) is None


@dataclass(frozen=True)
class _Option:
    least_s: float
    made: list[_Choice]

    def plans(self) -> list[_Choice]:
        return self.made
