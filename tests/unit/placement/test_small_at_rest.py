"""Small tensors stay on the device: a copy of a few bytes takes a latency, and frees nothing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import rule, smallest, streamed
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.improve import with_small_at_rest
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan, UpdateMode
from cotrain_compile.presets import find
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.examples import examples

PLENTY = 1 << 62
LAYERS = 4
SMALL = ("w1", "w3")  # and their states and gradients, in every other layer


def with_small_layers(dataflow: Dataflow) -> Dataflow:
    """`dataflow` in which what every other parameter has is a thousandth."""
    small = {f"{kind}{i}" for kind in ("w", "m", "g", "p32_", "m_", "v_") for i in (1, 3)}
    buffers = (
        replace(b, nbytes=max(4, b.nbytes // 1000)) if b.name in small else b
        for b in dataflow.buffers
    )
    return replace(dataflow, buffers=tuple(buffers))


def problem_of(dataflow: Dataflow, device_bytes: int = PLENTY) -> Problem:
    budgets = {Tier.DEVICE: device_bytes, Tier.HOST: PLENTY}
    return formulate(dataflow, find("h100"), budgets)


def small_tasks(plan: Plan) -> list[str]:
    return [task.name for task in plan.transfers if task.buffer[1:] in ("1", "3")]


def test_the_smallest_together_have_next_to_nothing() -> None:
    """Of equals all or none: which of them comes first says nothing."""
    sizes = {"matrix": 10_000, "bias": 40, "norm": 40, "scale": 40, "step": 4}
    assert smallest(sizes) == {"step"}
    assert smallest({**sizes, "matrix": 20_000}) == {"step", "bias", "norm", "scale"}
    assert smallest({"a": 8, "b": 8}) == frozenset()
    assert smallest({}) == frozenset()


def test_small_states_are_not_streamed() -> None:
    step = with_small_layers(chain(LAYERS, width=1024))
    placement = streamed(step)
    assert {m for m, tier in placement.homes.items() if tier is Tier.HOST} == {"m0", "m2"}
    assert placement.updates["w1"] is UpdateMode.RESIDENT
    assert placement.updates["w0"] is UpdateMode.STREAMED


def test_what_auto_moves_is_not_small_where_there_is_room() -> None:
    """A fraction by bytes, or a rounding, takes small ones along; the plan does not."""
    step = with_small_layers(chain(LAYERS, width=1024, batch=4096))
    free = problem_of(step)
    peak = schedule(free, rule("resident")(step)).predicted.peak_bytes[Tier.DEVICE]
    plan = solve(problem_of(step, int(0.8 * peak)), SolveSettings(policy="auto"))
    assert plan.tasks
    assert not small_tasks(plan)
    assert small_tasks(schedule(free, rule("zero-offload")(step)))


@examples(12)
@given(
    st.sampled_from(["zero-offload", "coarse", "fraction:0.5"]),
    st.booleans(),
    st.floats(0.3, 1.5),
)
def test_plans_in_which_small_ones_rest_are_sound(policy: str, mixed: bool, share: float) -> None:
    whole = mixed_precision_step(LAYERS, params=50_000) if mixed else chain(LAYERS, width=512)
    step = with_small_layers(whole)
    free = problem_of(step)
    placement = rule(policy)(step)
    peak = schedule(free, placement).predicted.peak_bytes[Tier.DEVICE]
    problem = free.with_budget(Tier.DEVICE, int(share * peak))
    calmer = list(with_small_at_rest(step, placement))
    assert calmer
    for fewer in calmer:
        moving = [p for p, mode in fewer.updates.items() if mode is not UpdateMode.RESIDENT]
        assert len(moving) < sum(m is not UpdateMode.RESIDENT for m in placement.updates.values())
        try:
            check(problem, schedule(problem, fewer))
        except PlacementError:
            assert share < 1.1  # what rests is a thousandth of what moves
    assert not list(with_small_at_rest(step, calmer[0]))
