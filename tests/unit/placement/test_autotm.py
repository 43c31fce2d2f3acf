"""AutoTM's program: as good as trying everything, its variants nested, its budgets exact.

`every_history` goes through all histories of all tensors and shares no code with the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import HostUpdate, Link, Tier, TierSpec, two_tier
from cotrain_compile.placement.autotm.arcs import Variant
from cotrain_compile.placement.autotm.autotm import OVERLAP_PRICE, autotm
from cotrain_compile.placement.autotm.step import Step
from cotrain_compile.placement.check.rules import check_placement
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import UpdateMode
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.every_history import everything
from tests.support.examples import examples

PLENTY = 1 << 62
VARIANTS: tuple[Variant, ...] = get_args(Variant)
MACHINE = two_tier(
    name="small",
    device=TierSpec(PLENTY, 1e9, {"float32": 1e9}),
    host=TierSpec(PLENTY, 1e9, {"float32": 1e9}),
    h2d=Link(bytes_per_s=2e6, latency_s=1e-4),
    d2h=Link(bytes_per_s=1e6, latency_s=2e-4),
    host_update=HostUpdate(1e6),
)


def problem_of(dataflow: Dataflow, budget_bytes: int, milliseconds: int = 5) -> Problem:
    costs = CostTable(
        device_s={op.name: milliseconds * 1e-3 for op in dataflow.ops},
        host_update_s={group.param: 50e-3 for group in dataflow.updates},
    )
    return Problem(dataflow, MACHINE, costs, {Tier.DEVICE: budget_bytes, Tier.HOST: PLENTY})


def within(problem: Problem, budget_bytes: int) -> Problem:
    return problem.with_budget(Tier.DEVICE, budget_bytes)


def least_bytes(problem: Problem, variant: Variant) -> int:
    """The least feasible budget, by what a refusal says is missing."""
    with pytest.raises(PlacementError) as refusal:
        autotm(within(problem, 0), variant)
    return refusal.value.shortfall_bytes


def arch(height: int, size: int = 1000) -> Dataflow:
    """Forward ops make h0, h1, ..., backward ops read them in reverse; no parameters."""
    names = [f"h{i}" for i in range(height)]
    ops = [Op(f"forward_{n}", "test.f", Phase.FORWARD, (), (n,)) for n in names]
    ops += [Op(f"backward_{n}", "test.b", Phase.BACKWARD, (n,), ()) for n in reversed(names)]
    buffers = tuple(Buffer(name, size, Role.TEMPORARY) for name in names)
    return Dataflow(f"arch-{height}", tuple(ops), buffers)


def with_frozen_weight(step: Dataflow, size: int = 1000) -> Dataflow:
    """The first and the last op of `step` read one more weight, which nothing updates."""
    first, *middle, last = (replace(op) for op in step.ops)
    first = replace(first, reads=(*first.reads, "frozen"))
    last = replace(last, reads=(*last.reads, "frozen"))
    frozen = Buffer("frozen", size, Role.PARAM, is_input=True, is_output=True)
    return replace(step, ops=(first, *middle, last), buffers=(*step.buffers, frozen))


def test_a_step_that_fits_stays_as_it_is() -> None:
    problem = problem_of(mixed_precision_step(2), PLENTY)
    for variant in VARIANTS:
        answer = autotm(problem, variant)
        assert answer.placement.policy == f"autotm-{variant}"
        assert answer.status == "optimal"
        assert answer.objective_s == pytest.approx(sum(problem.costs.device_s.values()))
        assert set(answer.placement.updates.values()) == {UpdateMode.RESIDENT}
        assert set(answer.placement.homes.values()) == {Tier.DEVICE}
        assert answer.placement.offloaded == ()


def test_one_activation_leaves_and_only_overlap_hides_its_copies() -> None:
    problem = problem_of(arch(5), 4000, milliseconds=2)
    stalled = autotm(problem, "synchronous")
    hidden = autotm(problem, "asynchronous")
    assert len(stalled.placement.offloaded) == len(hidden.placement.offloaded) == 1
    copies_s = 1.2e-3 + 0.6e-3  # 1000 bytes down at 1 MB/s and up at 2 MB/s, with latencies
    assert stalled.objective_s == pytest.approx(20e-3 + copies_s, rel=1e-6)
    assert hidden.objective_s == pytest.approx(20e-3 + OVERLAP_PRICE * copies_s, rel=1e-6)


def test_a_tensor_that_nobody_writes_again_leaves_the_second_time_for_free() -> None:
    """h is read three times with a large temporary in each gap: one copy down, two up."""
    ops = [
        Op("make", "test.make", Phase.FORWARD, (), ("h",)),
        Op("big_0", "test.big", Phase.FORWARD, (), ("t0",)),
        Op("read_0", "test.read", Phase.FORWARD, ("h",), ()),
        Op("big_1", "test.big", Phase.BACKWARD, (), ("t1",)),
        Op("read_1", "test.read", Phase.BACKWARD, ("h",), ()),
    ]
    buffers = [Buffer("h", 1000, Role.TEMPORARY)]
    buffers += [Buffer(name, 1500, Role.TEMPORARY) for name in ("t0", "t1")]
    step = Dataflow("twice", tuple(ops), tuple(buffers))
    answer = autotm(problem_of(step, 2000), "synchronous")
    assert answer.objective_s == pytest.approx(25e-3 + 1.2e-3 + 2 * 0.6e-3, rel=1e-6)


def test_the_static_variant_moves_only_what_host_updates_need() -> None:
    problem = problem_of(chain(2), 0)
    answer = autotm(within(problem, least_bytes(problem, "static")), "static")
    assert set(answer.placement.updates.values()) == {UpdateMode.HOST}
    assert answer.placement.offloaded == ()
    assert {answer.placement.homes[name] for name in ("w0", "w1")} == {Tier.DEVICE}
    assert {answer.placement.homes[name] for name in ("m0", "m1")} == {Tier.HOST}


def test_a_refusal_says_what_where_and_how_to_go_on() -> None:
    with pytest.raises(PlacementError, match=r"at \w+.*2.9 KiB.* short; raise memory_budget"):
        autotm(problem_of(arch(3), 5), "static")


def test_too_many_tensors_are_for_the_bucket_program() -> None:
    with pytest.raises(
        PlanError, match=r"400 tensors at most, this step has \d+; use the bucketed"
    ):
        autotm(problem_of(chain(140), PLENTY), "static")


def test_no_time_is_an_error_and_not_an_empty_answer() -> None:
    problem = problem_of(chain(2), 0)
    tight = within(problem, least_bytes(problem, "asynchronous"))
    with pytest.raises(PlanError, match="raise time_limit_s"):
        autotm(tight, "asynchronous", time_limit_s=0.0)


def test_ops_that_share_a_slot_keep_their_peak_and_updates_stay_apart() -> None:
    long = problem_of(arch(40), 0)
    assert Step(long).end < 80
    assert least_bytes(long, "static") == liveness(long.dataflow).peak_bytes
    training = Step(problem_of(mixed_precision_step(20), 0))
    owners: dict[int, set[bool]] = {}
    for op, slot in zip(training.dataflow.ops, training.slot_of, strict=False):
        owners.setdefault(slot, set()).add(op.name in training.group_of)
    assert all(len(kinds) == 1 for kinds in owners.values())
    for group in training.dataflow.updates:
        assert len({training.slot_of[training.dataflow.position[op]] for op in group.ops}) == 1


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """Up to four tensors: enough to try everything."""
    size = draw(st.sampled_from([64, 1000, 4096]))
    step = draw(
        st.sampled_from(
            [
                chain(1, width=16, batch=draw(st.integers(1, 40))),
                mixed_precision_step(1, params=size, batch_bytes=draw(st.integers(1, 9999))),
                arch(draw(st.integers(3, 4)), size),
                with_frozen_weight(arch(3, size), draw(st.integers(1, 5000))),
            ]
        )
    )
    return draw(with_random_seconds(step))


def with_random_seconds(step: Dataflow) -> st.SearchStrategy[Problem]:
    seconds = st.integers(0, 40).map(lambda n: n * 1e-4)
    return st.builds(
        lambda device, host: Problem(
            step,
            MACHINE,
            CostTable(
                dict(zip((op.name for op in step.ops), device, strict=True)),
                dict(zip((group.param for group in step.updates), host, strict=True)),
            ),
            {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY},
        ),
        st.lists(seconds, min_size=len(step.ops), max_size=len(step.ops)),
        st.lists(seconds, min_size=len(step.updates), max_size=len(step.updates)),
    )


@pytest.mark.parametrize("variant", VARIANTS)
@given(problem=small_problems(), room=st.floats(0, 1))
@examples(10)
def test_the_program_is_as_good_as_trying_everything(
    variant: Variant, problem: Problem, room: float
) -> None:
    least = least_bytes(problem, variant)
    most = sum(buffer.nbytes for buffer in problem.dataflow.buffers)
    assert everything(within(problem, least - 1), variant) is None
    for budget in {least, round(least + room * (most - least))}:
        answer = autotm(within(problem, budget), variant)
        best_s = everything(within(problem, budget), variant)
        assert answer.objective_s == pytest.approx(best_s, rel=2e-4, abs=1e-9)
        assert answer.bound_s <= answer.objective_s * (1 + 1e-9)


@st.composite
def training_steps(draw: st.DrawFn) -> Problem:
    layers = draw(st.integers(1, 2))
    if draw(st.booleans()):
        step = chain(layers, width=draw(st.integers(4, 40)), batch=draw(st.integers(1, 40)))
    else:
        params = draw(st.integers(10, 2000))
        step = mixed_precision_step(layers, params=params, batch_bytes=draw(st.integers(1, 9999)))
    return draw(with_random_seconds(step))


@given(problem=training_steps(), room=st.floats(0, 1))
@examples(4)
def test_each_variant_is_at_least_as_good_as_the_one_before(problem: Problem, room: float) -> None:
    needs = [least_bytes(problem, variant) for variant in VARIANTS]
    assert needs == sorted(needs, reverse=True)
    most = sum(buffer.nbytes for buffer in problem.dataflow.buffers)
    budget = round(needs[0] + room * (most - needs[0]))
    static, synchronous, asynchronous = (autotm(within(problem, budget), v) for v in VARIANTS)
    for answer in (static, synchronous, asynchronous):
        check_placement(problem.dataflow, answer.placement)
    assert synchronous.objective_s <= static.objective_s * (1 + 2e-4)
    assert asynchronous.bound_s <= synchronous.objective_s * (1 + 1e-9)
    if asynchronous.status == "optimal":
        assert asynchronous.objective_s <= synchronous.objective_s * (1 + 2e-4)
