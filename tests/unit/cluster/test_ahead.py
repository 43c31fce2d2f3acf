"""An exchange beside the next forward: steps, as the executor goes through its rounds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.answer.strategies import answer
from cotrain_compile.cluster.data_parallel.ahead import ROUNDS
from cotrain_compile.cluster.data_parallel.data_parallel import (
    DataParallelPlan,
    plan_data_parallel,
)
from cotrain_compile.cluster.model.profiles import BUCKET_BYTES, LayerProfile, per_sample
from cotrain_compile.distribute import helped_rounds
from cotrain_compile.distribute.updates_ahead import needed_first
from tests.support.clusters import a_model, some_machines
from tests.support.examples import examples

# Bytes of gradients that are summed in a second.
RATE = BUCKET_BYTES / 2


def planned(model: LayerProfile, samples: int, latency_s: float = 0.0) -> DataParallelPlan:
    return plan_data_parallel(
        model, some_machines(2, RATE), samples, counts=[2],
        sums_of=lambda _: lambda nbytes: nbytes / RATE + latency_s,
    )  # fmt: skip


class Executor:
    """Clocks of the device and of the network, and the calls that the executor makes."""

    def __init__(self, plan: DataParallelPlan) -> None:
        self.of, self.units = plan.replicas, plan.replicas.units
        (rank,), ring = self.of.ranks, self.of.ring
        assert ring
        assert ring.sum_s
        touched = sum(unit.touched_bytes for unit in self.units)
        self.update_s = touched / ROUNDS / rank.machine.device.bytes_per_s
        self.total = sum(unit.grad_bytes for unit in self.units)
        self.round_s = ring.sum_s(self.total / ROUNDS)
        self.clock = self.network = 0.0
        self.gone: list[float] = []  # when each round has come to its owners
        self.order: list[int] = needed_first(list(range(ROUNDS)))  # type: ignore[arg-type,assignment]
        self.has = [self.rounds_of(number) for number in range(len(self.units))]

    def rounds_of(self, number: int) -> set[int]:
        """Those that have some gradients of a unit, whose backward comes behind those after it."""
        behind = sum(unit.grad_bytes for unit in self.units[number + 1 :])
        ends = behind + self.units[number].grad_bytes
        each = Fraction(self.total, ROUNDS)
        return {r for r in range(ROUNDS) if r * each < ends and (r + 1) * each > behind}

    def begin_next(self) -> None:
        self.network = max(self.network, self.clock) + self.round_s
        self.gone.append(self.network)

    def step(self) -> None:
        """From the end of the forward before to that of the next step's."""
        self.gone = []
        size = self.of.micro_batch
        for i in range(self.of.micro_batches):
            self.clock += sum(unit.forward_s(size) for unit in self.units) if i else 0.0
            is_last = i == self.of.micro_batches - 1
            for number in reversed(range(len(self.units))):
                self.clock += self.units[number].backward_s(size)
                later = set().union(*self.has[:number])
                while is_last and len(self.gone) < ROUNDS // 2:
                    if self.order[len(self.gone)] in later:
                        break
                    self.begin_next()
        self.begin_next()
        kept = 0
        for number, unit in enumerate(self.units):
            while not self.has[number] <= set(self.order[:kept]):
                # A call begins a round, and keeps the one before the last.
                while len(self.gone) < min(kept + 3, ROUNDS + 1):
                    self.begin_next()
                self.clock = max(self.clock, self.gone[kept + 1]) + self.update_s
                kept += 1
            self.clock += unit.forward_s(size)
        assert kept == ROUNDS


def of_steps(plan: DataParallelPlan, steps: int) -> float:
    """The seconds of so many of them."""
    executor = Executor(plan)
    for _ in range(steps):
        executor.step()
    return executor.clock


def test_the_planner_has_the_rounds_of_the_executor() -> None:
    assert ROUNDS == helped_rounds.ROUNDS


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.sampled_from([0.05, 0.5, 2.0]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1]),
)
@examples(40)
def test_a_step_takes_what_many_of_them_take_each(
    params: list[int], forward_s: float, micro_batches: int, latency_s: float
) -> None:
    model = a_model([n * BUCKET_BYTES for n in params], per_sample(30), forward_s=forward_s)
    found = planned(model, 2 * micro_batches, latency_s)
    halved = replace(found.replicas, micro_batch=1, micro_batches=micro_batches)
    plan = replace(found, replicas=halved, beside_forward=True)
    assert of_steps(plan, 5) - of_steps(plan, 4) == pytest.approx(plan.step.seconds)
    assert plan.least_s <= plan.step.seconds
    assert plan.step.moved_bytes.keys() == found.step.moved_bytes.keys()
    plain = replace(plan, beside_forward=False)
    assert plan.sent_bytes == plain.sent_bytes
    assert plan.peak_bytes == plain.peak_bytes


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.sampled_from([0.05, 0.5, 2.0]),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([0.0, 0.1]),
)
@examples(40)
def test_the_better_of_both_ways_is_taken(
    params: list[int], forward_s: float, samples: int, latency_s: float
) -> None:
    """Of all sizes of micro-batches, each both ways."""
    model = a_model([n * BUCKET_BYTES for n in params], per_sample(30), forward_s=forward_s)
    found = planned(model, samples, latency_s)
    share = samples // 2
    each = [
        replace(found, replicas=of, beside_forward=ahead)
        for size in range(1, share + 1)
        if share % size == 0
        for of in [replace(found.replicas, micro_batch=size, micro_batches=share // size)]
        for ahead in (False, True)
    ]
    assert found.step.seconds == pytest.approx(min(plan.step.seconds for plan in each))


def test_a_row_says_that_an_exchange_goes_on_beside_the_forward() -> None:
    """Most gradients are the last layer's, and the forward of all others hides half of them."""
    model = a_model([BUCKET_BYTES] * 7 + [20 * BUCKET_BYTES], per_sample(30), forward_s=2.0)
    (row,) = answer(model, some_machines(2, RATE), 2, ("byteps",)).strategies
    assert "half of the exchange beside the next forward" in row.setting
    assert row.run.endswith("backwards within its ahead_of_forward(model, optimizers)")
    assert row.step_s is not None
    plan = planned(model, 2)
    assert row.step_s == pytest.approx(plan.step.seconds)
    assert row.step_s < 0.95 * replace(plan, beside_forward=False).step.seconds


def test_rounds_go_by_hand() -> None:
    """Eight equal layers, of a round each: the first forward waits for the sums of the fifth."""
    model = a_model([BUCKET_BYTES] * 8, per_sample(30), forward_s=4.0)
    found = planned(model, 2)
    halved = replace(found.replicas, micro_batch=1, micro_batches=1)
    plan = replace(found, replicas=halved, beside_forward=True)
    ends = {span.name: span.end_s for span in plan.step.timeline.spans}
    backward_s = 8 * 8.0
    # Four rounds of 2 s are over, and the fifth begins with the last gradient; its sums come back
    # beside the sixth.
    assert ends["round 4"] == pytest.approx(backward_s + 2.0)
    assert ends["round 5"] == pytest.approx(backward_s + 4.0)
    assert plan.step.seconds == pytest.approx(backward_s + 4.0 + 8 * 4.0)
